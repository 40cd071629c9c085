"""Deep trees, memory, and corruption that is noticed."""

from __future__ import annotations

import tracemalloc
import weakref

import numpy as np
import pytest

from cache import CacheCorruption, PagePool, PrefixCache


def test_a_chain_of_ten_thousand_nodes_does_not_recurse(store):
    cache, tokens = PrefixCache(PagePool(10_001, 1)), np.arange(10_000, dtype=np.int32)
    store(cache, tokens)
    for limit in range(9_999, 0, -1):
        cache.acquire(tokens, limit=limit).release()
    lease = cache.acquire(tokens)
    assert lease.cached_tokens == 10_000
    assert lease.pages.tolist() == list(range(10_000))
    lease.reserve(10_001)
    lease.commit([*tokens, 7])
    lease.release()
    cache.check()
    assert cache.tree(depth=20_000, limit=20_000).children[0].children[0].n_pages == 1
    assert cache.evict(10_001) == list(range(10_000, -1, -1))


@pytest.mark.parametrize(("page_size", "bytes_per_token"), [(1, 40), (16, 8)])
def test_bytes_per_cached_token(page_size, bytes_per_token, store):
    length, sequences = 256, 200
    cache = PrefixCache(PagePool(length * sequences // page_size, page_size), max_event_pages=0)
    tracemalloc.start()
    for n in range(sequences):
        store(cache, np.arange(n * length, (n + 1) * length, dtype=np.int32))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cache.usage.free == 0
    assert size / (length * sequences) < bytes_per_token


def test_the_tree_keeps_no_array_of_a_request_alive():
    cache = PrefixCache(PagePool(2000, 1), max_event_pages=0)
    tokens = np.arange(1000, dtype=np.int32)
    lease = cache.acquire(tokens)
    lease.reserve(1000)
    lease.commit(tokens)
    gone = weakref.ref(tokens)
    del tokens
    assert gone() is None


def test_bytes_per_node_of_a_single_page(store):
    length = 2000
    cache, tokens = PrefixCache(PagePool(length, 1), max_event_pages=0), np.arange(length, dtype=np.int32)
    tracemalloc.start()
    store(cache, tokens)
    for limit in range(length - 1, 0, -1):
        cache.acquire(tokens, limit=limit).release()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size / length < 520


def corrupt_pin(cache, node):
    cache.pin("ann", [1], seconds=9)
    cache._ledger.pins._held.clear()


def corrupt_locks(cache, node):
    node.locks += 1


def corrupt_tokens(cache, node):
    node.tokens[0] += 1


def corrupt_pages(cache, node):
    node.pages[0] = node.pages[1]


def corrupt_counts(cache, node):
    cache._ledger.tree.evictable_pages -= 1


def corrupt_counters(cache, node):
    cache._ledger.counters.inserted_pages += 1


def corrupt_parent(cache, node):
    node.parent = next(iter(node.children), None)


def corrupt_owner(cache, node):
    node.owner = "ann"


def corrupt_candidates(cache, node):
    cache._ledger.tree.policy.locked(node)


def corrupt_pool(cache, node):
    cache._ledger.pool.free([node.pages[0]])


def corrupt_runs(cache, node):
    cache._ledger.pool._is_free[node.pages[0]] = True


def corrupt_table(cache, node):
    next(iter(cache._ledger.leases))._pages = np.array([9], np.int32)


@pytest.mark.parametrize(
    "corrupt",
    [
        corrupt_pin,
        corrupt_locks,
        corrupt_tokens,
        corrupt_pages,
        corrupt_counts,
        corrupt_counters,
        corrupt_parent,
        corrupt_owner,
        corrupt_candidates,
        corrupt_pool,
        corrupt_runs,
        corrupt_table,
    ],
)
def test_check_finds(corrupt, store):
    cache = PrefixCache(PagePool(10, 1))
    store(cache, [1, 2, 3])
    store(cache, [7, 8])
    cache.acquire([7])
    cache.check()
    corrupt(cache, cache._ledger.tree.roots[""].child(np.int32(1).tobytes()))
    with pytest.raises(CacheCorruption):
        cache.check()
