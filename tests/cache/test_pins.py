"""What is kept or dropped by hand: pins, single nodes, and the pages of an owner."""

from __future__ import annotations

import pytest

from cache import PagePool, Pin, PinLimit, PrefixCache, Usage


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(clock, store) -> PrefixCache:
    cache = PrefixCache(PagePool(20, 2), clock=clock, max_pinned_pages=4)
    store(cache, [1, 2, 3, 4, 5, 6])
    store(cache, [1, 2, 7, 8])
    store(cache, [9, 9], namespace="b")
    return cache


def test_a_pin_keeps_whole_pages_until_it_expires(cache, clock):
    assert cache.pin("ann", [1, 2, 3, 4, 5], seconds=10) == Pin("ann", "", 2, 10.0)
    assert cache.usage == Usage(free=15, evictable=3, locked=2, private=0)
    clock.now = 9.9
    assert len(cache.evict(20)) == 3
    assert cache.match_length([1, 2, 3, 4, 5, 6]) == 4
    clock.now = 10.0
    assert len(cache.evict(20)) == 2
    assert cache.pins == ()
    cache.check()


def test_room_is_made_by_ending_old_pins(cache, clock):
    cache.pin("ann", [1, 2, 3, 4, 5, 6], seconds=1)
    clock.now = 2.0
    lease = cache.acquire(range(100, 140))
    lease.reserve(40)
    assert cache.usage == Usage(free=0, evictable=0, locked=0, private=20)


def test_a_pin_is_no_use(cache):
    before = cache.stats, cache.tree(depth=9)
    cache.pin("ann", [1, 2, 3, 4, 5, 6], seconds=10)
    cache.unpin("ann")
    assert (cache.stats, cache.tree(depth=9)) == before


def test_an_owner_has_one_pin_and_all_share_the_limit(cache):
    cache.pin("ann", [1, 2, 3, 4], seconds=10)
    cache.pin("bob", [1, 2, 7, 8], seconds=10)
    assert cache.usage.locked == 3
    cache.pin("ann", [1, 2, 3, 4, 5, 6], seconds=10)
    assert cache.usage.locked == 4
    with pytest.raises(PinLimit) as refusal:
        cache.pin("cleo", [9, 9], seconds=10, namespace="b")
    assert (refusal.value.wanted, refusal.value.limit) == (5, 4)
    assert [pin.owner for pin in cache.pins] == ["bob", "ann"]
    cache.check()


@pytest.mark.parametrize(("tokens", "namespace"), [([5, 5], ""), ([1], ""), ([1, 2], "nobody's")])
def test_pinning_what_is_not_cached_holds_nothing(cache, tokens, namespace):
    cache.pin("ann", [1, 2], seconds=10)
    assert cache.pin("ann", tokens, seconds=10, namespace=namespace).n_pages == 0
    assert cache.pins == ()
    assert len(cache.tree().children) == 2
    cache.check()


def test_close_and_reset_end_pins(cache, store):
    store(cache, [4, 4], owner="ann")
    cache.pin("ann", [4, 4], seconds=10)
    assert len(cache.close("ann")) == 1
    cache.pin("bob", [1, 2], seconds=10)
    assert cache.reset() is True
    assert (cache.pins, cache.usage.free) == ((), 20)
    cache.check()


def test_owners_are_counted_by_the_pages_that_are_theirs_alone(store):
    cache = PrefixCache(PagePool(20, 1))
    store(cache, [1, 2, 3], owner="ann")
    store(cache, [1, 2, 4, 5], owner="bob")
    assert cache.owners() == {"ann": 1, "bob": 2}
    cache.close("bob")
    assert cache.owners() == {"ann": 1}


def test_a_node_is_evicted_with_all_below_it_that_nobody_holds(cache):
    (trunk,) = cache.tree().children[0].children
    held = cache.acquire([1, 2, 7, 8])
    assert len(cache.evict_node(trunk.id)) == 2
    assert cache.usage == Usage(free=17, evictable=1, locked=2, private=0)
    held.release()
    assert len(cache.evict_node(trunk.id)) == 2
    assert cache.evict_node(trunk.id) == []
    assert (cache.stats.cleared_pages, cache.stats.evicted_pages) == (4, 0)
    cache.check()


def test_a_whole_namespace_is_evicted_by_its_root(cache):
    root = cache.tree().children[0]
    assert len(cache.evict_node(root.id)) == 4
    assert [child.namespace for child in cache.tree().children] == ["b"]
    cache.check()
