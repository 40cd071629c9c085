"""Replays a load through the real prefix cache, without a model: what is found, and what it costs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from tqdm import tqdm

from cache import OutOfPages, PagePool, PolicyName, PrefixCache
from chatd.bench.trace import Request, shared_tokens

MEMORY_REQUESTS = 2000


@dataclass(frozen=True, slots=True)
class Replay:
    """Rates are shares of looked-up tokens, None without any; the second leaves out what all prompts begin with.

    Times are means in microseconds: of a look-up, of storing a request, of evicting a page (the whole reserve that
    evicted it). Bytes are Python's memory per cached token after the first 2,000 requests, without the pool's own.
    """

    policy: str
    pages: int
    page_size: int
    requests: int
    refused: int
    hit_rate: float | None
    hit_rate_beyond_shared: float | None
    evicted_pages: int
    acquire_us: float
    commit_us: float
    evict_us_per_page: float | None
    bytes_per_token: float | None


def replay(
    requests: Sequence[Request],
    policy: PolicyName,
    pages: int,
    page_size: int,
) -> Replay:
    """One request after the other, each stored as a whole. One that the pool cannot hold is refused and left out.

    Draws a progress bar where stderr is a terminal.
    """
    cache = PrefixCache(PagePool(pages, page_size), policy, max_event_pages=0)
    shared = shared_tokens(requests)
    shared -= shared % page_size
    acquire = commit = evict = 0.0
    refused = beyond_asked = beyond_found = 0
    for request in tqdm(requests, desc=f"{policy}, {pages} pages", leave=False, disable=None):
        tokens = np.concatenate((request.prompt, request.answer))
        evicted = cache.stats.evicted_pages
        start = perf_counter()
        lease = cache.acquire(request.prompt)
        acquired = perf_counter()
        try:
            lease.reserve(len(tokens))
        except OutOfPages:
            lease.release()
            refused += 1
            continue
        reserved = perf_counter()
        lease.commit(tokens)
        committed = perf_counter()
        lease.release()
        acquire += acquired - start
        commit += committed - reserved
        evict += reserved - acquired if cache.stats.evicted_pages > evicted else 0.0
        beyond_asked += len(request.prompt) - shared
        beyond_found += max(0, lease.cached_tokens - shared)
    stats, kept = cache.stats, max(1, len(requests) - refused)
    return Replay(
        policy=policy,
        pages=pages,
        page_size=page_size,
        requests=len(requests),
        refused=refused,
        hit_rate=stats.hit_rate,
        hit_rate_beyond_shared=beyond_found / beyond_asked if beyond_asked else None,
        evicted_pages=stats.evicted_pages,
        acquire_us=acquire / kept * 1e6,
        commit_us=commit / kept * 1e6,
        evict_us_per_page=evict / stats.evicted_pages * 1e6 if stats.evicted_pages else None,
        bytes_per_token=_bytes_per_token(requests[:MEMORY_REQUESTS], policy, pages, page_size),
    )


def _bytes_per_token(requests: Sequence[Request], policy: PolicyName, pages: int, page_size: int) -> float | None:
    cache = PrefixCache(PagePool(pages, page_size), policy, max_event_pages=0)
    tracemalloc.start()
    try:
        for request in requests:
            lease = cache.acquire(request.prompt)
            tokens = np.concatenate((request.prompt, request.answer))
            try:
                lease.reserve(len(tokens))
                lease.commit(tokens)
            except OutOfPages:
                pass
            lease.release()
        del lease, tokens
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    cached = cache.usage.evictable * page_size
    return size / cached if cached else None
