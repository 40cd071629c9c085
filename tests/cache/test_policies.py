"""Which leaf goes first, policy by policy."""

from __future__ import annotations

import pytest

from cache import PagePool, PrefixCache

# a, b, c, d are stored in this order, then d, d, d, a, a, b are looked up.
ORDERS = [
    ("lru", "cdab"),
    ("lfu", "cbad"),
    ("fifo", "abcd"),
    ("mru", "badc"),
    ("filo", "dcba"),
    ("slru", "cbda"),
    ("priority", "dacb"),
    ("turns", "cdab"),
]
PRIORITY = {"a": 0, "b": 2, "c": 1, "d": 0}


@pytest.mark.parametrize(("policy", "order"), ORDERS)
def test_order_of_eviction(policy, order, store):
    cache, name_of = PrefixCache(PagePool(10, 1), policy), {}
    for name in "abcd":
        lease = cache.acquire([ord(name)], priority=PRIORITY[name])
        lease.reserve(1)
        lease.commit([ord(name)])
        name_of[int(lease.pages[0])] = name
        lease.release()
    for name in "dddaab":
        cache.acquire([ord(name)]).release()
    cache.check()
    assert "".join(name_of[page] for page in cache.evict(10)) == order


def test_priority_reaches_the_ancestors(store):
    cache = PrefixCache(PagePool(10, 1), "priority")
    store(cache, [1, 2])
    store(cache, [3, 4], priority=1)
    store(cache, [1, 2, 5], priority=2)
    cache.evict(2)
    assert [cache.match_length(tokens) for tokens in ([1, 2, 5], [3, 4])] == [3, 0]


@pytest.mark.parametrize("policy", [name for name, _ in ORDERS])
def test_held_and_inner_nodes_are_never_victims(policy, store):
    cache = PrefixCache(PagePool(20, 1), policy)
    for tokens in ([1, 2, 3, 4], [1, 2, 5], [6, 7], [1, 2, 3, 8]):
        store(cache, tokens)
    held = cache.acquire([1, 2, 3])
    assert len(cache.evict(20)) == 5
    assert cache.match_length([1, 2, 3, 4]) == 3
    held.release()
    assert len(cache.evict(20)) == 3
    cache.check()


def test_turns_keeps_conversations_under_way(store):
    """Both were used for the last time in one round; the one that found most of its prompt is the later turn."""
    cache = PrefixCache(PagePool(40, 1), "turns")
    store(cache, range(10))
    for first in range(100, 1100, 10):
        store(cache, range(first, first + 10))
    store(cache, range(1090, 1102))
    store(cache, range(2000, 2012))
    cache.evict(16)
    assert [cache.match_length(range(start, start + 10)) for start in (1090, 2000)] == [10, 10]
    cache.evict(12)
    assert [cache.match_length(range(start, start + 10)) for start in (1090, 2000)] == [10, 0]


def test_turns_lets_background_work_go_first(store):
    cache = PrefixCache(PagePool(12, 1), "turns")
    for first in range(0, 1000, 10):
        store(cache, range(first, first + 10))
    cache.evict(10)
    store(cache, [1, 2])
    lease = cache.acquire([1, 2, 3, 4])
    lease.reserve(4, may_evict=False)
    lease.commit([1, 2, 3, 4])
    lease.release()
    cache.evict(2)
    assert cache.match_length([1, 2, 3, 4]) == 2


def test_an_unknown_policy_is_named():
    with pytest.raises(ValueError, match="no eviction policy 'best'"):
        PrefixCache(PagePool(1, 1), "best")


def test_looking_up_one_prefix_for_ever_does_not_fill_the_heap(store):
    cache = PrefixCache(PagePool(10, 1))
    store(cache, [1, 2])
    for _ in range(1000):
        cache.acquire([1, 2]).release()
    assert len(cache._ledger.tree.policy._heap) < 100
