"""A published production trace, replayed: the share of blocks found is known to the last digit."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from cache import PagePool, PrefixCache

TRACE = Path(__file__).parent / "data" / "conversation_2500.txt.gz"


@pytest.fixture(scope="module")
def requests() -> list[list[int]]:
    with gzip.open(TRACE, "rt") as lines:
        return [[int(block) for block in line.split()] for line in lines]


# Every request shares block 0, so the share is also given without it.
@pytest.mark.parametrize(
    ("blocks", "share", "without_first"),
    [(300, 0.0377, 0.0009), (1000, 0.0403, 0.0035), (5000, 0.1088, 0.0746), (70_000, 0.3008, 0.2740)],
)
def test_share_of_blocks_found_under_lru(requests, store, blocks, share, without_first):
    cache = PrefixCache(PagePool(blocks, 1))
    found = [store(cache, request) for request in requests]
    total = sum(map(len, requests))
    assert round(cache.stats.hit_rate, 4) == share
    assert round(sum(max(0, n - 1) for n in found) / (total - len(requests)), 4) == without_first
    assert (cache.stats.query_tokens, cache.stats.hit_tokens) == (total, sum(found))
    cache.check()


@pytest.mark.parametrize(
    ("policy", "share"),
    [
        ("turns", 0.1165),
        ("lfu", 0.1141),
        ("fifo", 0.1090),
        ("mru", 0.0872),
        ("filo", 0.0872),
        ("slru", 0.1073),
        ("priority", 0.1088),
    ],
)
def test_share_of_blocks_found_in_5000_under_other_policies(requests, store, policy, share):
    cache = PrefixCache(PagePool(5000, 1), policy)
    for request in requests:
        store(cache, request)
    assert round(cache.stats.hit_rate or 0, 4) == share
    cache.check()
