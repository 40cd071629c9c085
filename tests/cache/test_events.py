"""What a mirror of the cache is told."""

from __future__ import annotations

from cache import Cleared, PagePool, PrefixCache, Removed, Resync, Stored


def plain(event: object) -> tuple[object, ...]:
    match event:
        case Stored(namespace, parent, pages, tokens):
            return ("stored", namespace, parent, pages.tolist(), tokens.tolist())
        case Removed(pages):
            return ("removed", pages.tolist())
        case _:
            return (type(event).__name__.lower(),)


def drain(cache: PrefixCache) -> list[tuple[object, ...]]:
    return [plain(event) for event in cache.drain_events()]


def test_one_event_per_commit_and_per_eviction_and_none_per_split(store):
    cache = PrefixCache(PagePool(8, 2))
    store(cache, [1, 2, 3, 4, 5], namespace="a")
    first, second = cache.acquire([1, 2, 3, 4], namespace="a").pages.tolist()
    cache.acquire([1, 2], namespace="a").release()
    lease = cache.acquire([1, 2, 9, 9], namespace="a")
    lease.reserve(4)
    lease.commit([1, 2, 9])
    lease.commit([1, 2, 9, 9])
    assert drain(cache) == [
        ("stored", "a", None, [first, second], [1, 2, 3, 4]),
        ("stored", "a", first, [int(lease.pages[1])], [9, 9]),
    ]
    assert drain(cache) == []


def test_eviction_tells_children_first(store):
    cache = PrefixCache(PagePool(8, 1))
    store(cache, [1, 2])
    store(cache, [1, 3])
    cache.drain_events()
    freed = cache.evict(8)
    assert drain(cache) == [("removed", freed)]
    assert len(freed) == 3
    cache.evict(8)
    assert drain(cache) == []


def test_reset_is_one_event(store):
    cache = PrefixCache(PagePool(8, 1))
    store(cache, [1])
    cache.reset()
    assert cache.drain_events()[1:] == [Cleared()]


def test_a_log_that_nobody_reads_stays_small_and_ends_in_a_resync(store):
    cache = PrefixCache(PagePool(8, 1), max_event_pages=4)
    store(cache, [1, 2, 3])
    store(cache, [1, 2, 4, 5])
    assert cache.drain_events()[0] == Resync()
    store(cache, [6])
    assert [event[0] for event in drain(cache)] == ["stored"]
    store(cache, [7, 8, 9, 1, 2, 3, 4])
    told = drain(cache)
    assert told[0] == ("resync",)
    assert sum(len(event[3]) for event in told[1:]) == cache.usage.evictable
    assert told[1][2] is None
