"""Namespaces, owners, statistics and the reasons for misses."""

from __future__ import annotations

import pytest

from cache import CacheStats, PagePool, PrefixCache, Usage


def test_namespaces_share_the_pool_but_no_page(store):
    cache = PrefixCache(PagePool(6, 1))
    assert store(cache, [1, 2], namespace="a") == 0
    assert store(cache, [1, 2], namespace="b") == 0
    assert (cache.match_length([1, 2], "a"), cache.match_length([1, 2], "b")) == (2, 2)
    assert (cache.match_length([1, 2], "c"), cache.match_length([1, 2])) == (0, 0)
    cache.acquire([1, 2], namespace="a").release()
    cache.evict(2)
    assert (cache.match_length([1, 2], "a"), cache.match_length([1, 2], "b")) == (2, 0)
    cache.check()


def test_an_empty_namespace_leaves_nothing_behind(store):
    cache = PrefixCache(PagePool(6, 1))
    for name in map(str, range(20)):
        cache.acquire([1], namespace=name).release()
        store(cache, [1, 2], namespace=name)
    assert len(cache.tree().children) == 3
    cache.evict(6)
    assert cache.tree().children == ()


def test_closing_an_owner_frees_what_nobody_else_has_used(store):
    cache = PrefixCache(PagePool(20, 1))
    store(cache, [1, 2, 3, 4, 5], owner="ann")
    store(cache, [1, 2, 6], owner="bob")
    store(cache, [7], owner="ann")
    store(cache, [8])
    held = cache.acquire([1, 2, 3], owner="ann")
    assert len(cache.close("ann")) == 3
    assert [cache.match_length(tokens) for tokens in ([1, 2, 3, 4], [1, 2, 6], [7], [8])] == [3, 3, 0, 1]
    held.release()
    assert len(cache.close("ann")) == 1
    assert cache.close("ann") == cache.close("nobody") == []
    assert (cache.stats.cleared_pages, cache.stats.resident_pages) == (4, 4)
    cache.check()


def test_a_look_up_by_somebody_else_ends_ownership(store):
    cache = PrefixCache(PagePool(20, 1))
    store(cache, [1, 2, 3], owner="ann")
    cache.acquire([1, 2]).release()
    cache.close("ann")
    assert cache.match_length([1, 2, 3]) == 2


def test_statistics_of_three_prompts():
    cache, shared = PrefixCache(PagePool(20, 16)), list(range(48))
    assert cache.stats.hit_rate is None
    for n, length in enumerate((55, 53, 54)):
        tokens = shared + [100 + n] * (length - 48)
        lease = cache.acquire(tokens)
        assert cache.stats.lookups == n
        lease.reserve(length)
        lease.commit(tokens)
        lease.reserve(length + 1)
    assert (cache.stats.lookups, cache.stats.query_tokens, cache.stats.hit_tokens) == (3, 162, 96)
    assert cache.stats.hit_rate == pytest.approx(96 / 162)


def test_what_is_not_admitted_or_runs_again_is_no_look_up(store):
    cache = PrefixCache(PagePool(4, 1))
    store(cache, [1, 2])
    before = cache.stats
    cache.acquire([1, 2, 3]).release()
    lease = cache.acquire([1, 2, 3], record=False)
    lease.reserve(3)
    lease.fork()
    cache.match_length([1, 2])
    assert cache.stats == before


def test_counters_balance_and_only_grow(store):
    now = [100.0]
    cache = PrefixCache(PagePool(4, 1), clock=lambda: now[0])
    store(cache, [1, 2, 3])
    now[0] = 101.5
    store(cache, [4, 5])
    assert cache.stats == CacheStats(
        lookups=2,
        query_tokens=5,
        hit_tokens=0,
        inserted_pages=5,
        evicted_pages=1,
        duplicate_pages=0,
        cleared_pages=0,
        evicted_idle_ms=1500,
    )
    cache.reset()
    assert (cache.stats.cleared_pages, cache.stats.resident_pages) == (4, 0)
    assert cache.usage == Usage(free=4, evictable=0, locked=0, private=0)


@pytest.mark.parametrize(
    ("asked", "limit", "reason"),
    [
        ([], None, "none"),
        ([1, 2, 3, 4], None, "none"),
        ([1, 2, 3, 4, 5], None, "tail"),
        ([1, 2, 3, 4, 5], 4, "tail"),
        ([1, 2, 3, 4], 3, "limit"),
        ([1, 2, 3, 4], 0, "off"),
        ([5], None, "short"),
        ([5], 0, "short"),
        ([1, 2], 1, "short"),
        ([5, 6], None, "new"),
        ([1, 2, 3, 4, 5, 6], None, "extends@4"),
        ([1, 2, 9, 9], None, "diverged@2"),
        ([1, 2, 3, 9], None, "diverged@3"),
        ([1, 2, 6, 9], None, "diverged@3"),
        ([1, 9], None, "diverged@1"),
        ([7, 8, 9, 9], None, "evicted@2"),
        ([10, 11], None, "evicted@0"),
    ],
)
def test_the_reason_for_a_miss(asked, limit, reason, store):
    cache = PrefixCache(PagePool(20, 2))
    store(cache, [10, 11])
    store(cache, [7, 8, 9, 9])
    store(cache, [1, 2, 3, 4])
    store(cache, [1, 2, 6, 7])
    cache.evict(2)
    assert str(cache.acquire(asked, limit=limit).miss) == reason
