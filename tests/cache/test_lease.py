"""The lease, call by call."""

from __future__ import annotations

import numpy as np
import pytest

from cache import LeaseClosed, OutOfPages, PagePool, PrefixCache, TailCopy, Usage


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(PagePool(10, 2))


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3, 4],
        (1, 2, 3, 4),
        range(1, 5),
        np.array([1, 2, 3, 4], np.int32),
        np.array([1, 2, 3, 4], np.int64),
        np.array([1, 2, 3, 4], np.uint16),
        np.array([1, 0, 2, 0, 3, 0, 4], np.int32)[::2],
        np.array([1, 2, 3, 4], ">i4"),
    ],
)
def test_any_integer_sequence_is_taken(cache, tokens):
    lease = cache.acquire(tokens)
    lease.reserve(4)
    lease.commit(tokens)
    assert cache.match_length([1, 2, 3, 4]) == 4


@pytest.mark.parametrize(
    "tokens", [[[1, 2], [3, 4]], [1.0, 2.0], ["a"], [2**31], [True, False], np.zeros((2, 2), np.int32)]
)
def test_anything_else_is_a_value_error(cache, tokens):
    with pytest.raises(ValueError, match="token"):
        cache.acquire(tokens)
    lease = cache.acquire([1, 2])
    lease.reserve(8)
    with pytest.raises(ValueError, match="token"):
        lease.commit([*tokens, *tokens])
    lease.commit([1, 2])
    lease.release()
    assert cache.usage.private == 0
    cache.check()


def test_a_negative_limit_is_a_value_error_and_zero_finds_nothing(cache, store):
    store(cache, [1, 2])
    with pytest.raises(ValueError, match="limit"):
        cache.acquire([1, 2], limit=-1)
    lease = cache.acquire([1, 2], limit=0)
    assert lease.cached_tokens == 0
    lease.reserve(2)
    lease.release()
    assert cache.usage == Usage(free=9, evictable=1, locked=0, private=0)


def test_reserving_less_than_there_is_changes_nothing(cache):
    lease = cache.acquire([1, 2, 3])
    for n_tokens, pages in ((5, 3), (1, 3), (0, 3), (6, 3), (7, 4)):
        lease.reserve(n_tokens)
        assert len(lease.pages) == pages


@pytest.mark.parametrize("length", [1, 3, 7])
def test_a_commit_neither_shrinks_nor_outgrows_what_is_reserved(cache, length):
    lease = cache.acquire([0, 1, 2, 3])
    lease.reserve(5)
    lease.commit([0, 1, 2, 3])
    with pytest.raises(ValueError, match="committed"):
        lease.commit(list(range(length)))
    assert lease.committed_tokens == 4


def test_a_commit_may_not_be_shorter_than_what_was_found(cache, store):
    store(cache, [0, 1, 2, 3])
    lease = cache.acquire([0, 1, 2, 3])
    with pytest.raises(ValueError, match="committed"):
        lease.commit([0, 1])


def test_commit_reads_only_beyond_the_last_full_page(cache):
    buffer = np.arange(6, dtype=np.int32)
    lease = cache.acquire(buffer)
    lease.reserve(6)
    lease.commit(buffer[:5])
    buffer[:4] = -7
    lease.commit(buffer)
    assert cache.match_length(range(6)) == 6


def test_page_tables_are_read_only_and_never_change_once_read(cache, store):
    lease = cache.acquire([1, 2, 3, 4])
    lease.reserve(4)
    table = lease.pages
    copy = table.tolist()
    store(cache, [1, 2, 3, 4])
    lease.reserve(5)
    lease.commit([1, 2, 3, 4])
    assert table.tolist() == copy
    assert lease.pages[:2].tolist() != copy
    with pytest.raises(ValueError, match="read-only"):
        lease.pages[0] = 1


def test_releasing_twice_is_one_release(cache):
    lease = cache.acquire([1, 2, 3])
    lease.reserve(3)
    lease.commit([1, 2, 3])
    other = cache.acquire([1, 2])
    lease.release()
    lease.release()
    assert cache.usage == Usage(free=9, evictable=0, locked=1, private=0)
    other.release()
    assert cache.usage == Usage(free=9, evictable=1, locked=0, private=0)


@pytest.mark.parametrize(
    "call",
    [
        lambda lease: lease.reserve(1),
        lambda lease: lease.commit([1]),
        lambda lease: lease.fork(),
        lambda lease: lease.pages,
    ],
)
def test_any_other_call_on_a_released_lease_raises(cache, call):
    lease = cache.acquire([1])
    lease.release()
    with pytest.raises(LeaseClosed):
        call(lease)
    assert lease.cached_tokens == 0


def test_releasing_commits_nothing(cache):
    lease = cache.acquire([1, 2])
    lease.reserve(2)
    lease.release()
    assert cache.match_length([1, 2]) == 0


def test_fork_shares_full_pages_and_tells_what_to_copy(cache):
    lease = cache.acquire([1, 2, 3, 4, 5])
    lease.reserve(5)
    lease.commit([1, 2, 3, 4, 5])
    fork = lease.fork()
    assert fork.pages[:2].tolist() == lease.pages[:2].tolist()
    assert fork.tail_copy == TailCopy(int(lease.pages[2]), int(fork.pages[2]), 1)
    for branch, last in ((lease, 6), (fork, 7)):
        branch.commit([1, 2, 3, 4, 5, last])
    lease.release()
    assert cache.match_length([1, 2, 3, 4, 5, 7]) == 6
    assert cache.usage == Usage(free=6, evictable=1, locked=3, private=0)
    fork.release()
    cache.check()


def test_fork_of_full_pages_needs_none(cache):
    lease = cache.acquire([1, 2, 3, 4])
    lease.reserve(4)
    lease.commit([1, 2, 3, 4])
    fork = lease.fork()
    assert fork.tail_copy is None
    assert (fork.cached_tokens, fork.pages.tolist()) == (4, lease.pages.tolist())
    assert cache.usage == Usage(free=8, evictable=0, locked=2, private=0)


def test_fork_without_room_is_refused_with_nothing_changed():
    cache = PrefixCache(PagePool(2, 2))
    lease = cache.acquire([1, 2, 3])
    lease.reserve(3)
    lease.commit([1, 2, 3])
    with pytest.raises(OutOfPages):
        lease.fork()
    assert cache.usage == Usage(free=0, evictable=0, locked=1, private=1)
    cache.check()


def test_background_work_takes_free_pages_only_and_goes_first(store):
    cache = PrefixCache(PagePool(6, 1))
    store(cache, [1, 2])
    lease = cache.acquire([3, 4, 5, 6])
    with pytest.raises(OutOfPages):
        lease.reserve(5, may_evict=False)
    lease.reserve(4, may_evict=False)
    lease.commit([3, 4, 5, 6])
    lease.release()
    store(cache, [7, 8])
    assert [cache.match_length(tokens) for tokens in ([1, 2], [3, 4, 5, 6], [7, 8])] == [2, 2, 2]
    cache.acquire([3, 4]).release()
    cache.evict(2)
    assert [cache.match_length(tokens) for tokens in ([1, 2], [3, 4], [7, 8])] == [0, 2, 2]
