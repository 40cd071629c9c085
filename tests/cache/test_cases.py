"""The behaviour of the prefix cache, case by case."""

from __future__ import annotations

import pytest

from cache import OutOfPages, PagePool, PrefixCache, Usage


def new(num_pages: int, page_size: int) -> PrefixCache:
    return PrefixCache(PagePool(num_pages, page_size))


def count_nodes(cache: PrefixCache) -> int:
    top = cache.tree(depth=50, limit=1000)
    stack, nodes = [child for root in top.children for child in root.children], 0
    while stack:
        nodes += 1
        stack.extend(stack.pop().children)
    return nodes


@pytest.mark.parametrize(
    ("page_size", "stored", "asked", "matched"),
    [
        (4, [range(10)], range(3), 0),
        (4, [range(10)], range(4), 4),
        (4, [range(10)], range(7), 4),
        (4, [range(10)], range(8), 8),
        (4, [range(10)], range(10), 8),
        (4, [range(1, 9)], [1, 2, 3, 9, 5, 6, 7, 8], 0),
        (2, [range(1, 9), [1, 2, 9, 10]], [1, 2, 3, 4, 999, 1000], 4),
        (2, [range(1, 9), [1, 2, 9, 10]], [1, 2, 3, 4, 5, 6, 777, 888], 6),
        (2, [range(1, 9), [1, 2, 9, 10]], [1, 2, 3, 9], 2),
        (1, [[1, 2, 3]], [], 0),
        (16, [range(15)], range(15), 0),
    ],
)
def test_match_is_the_longest_common_prefix_in_whole_pages(page_size, stored, asked, matched, store):
    cache = new(100, page_size)
    for tokens in stored:
        store(cache, list(tokens))
    assert cache.match_length(list(asked)) == matched
    assert cache.acquire(list(asked)).cached_tokens == matched
    cache.check()


@pytest.mark.parametrize(
    ("page_size", "cached", "computed"), [(1, 6, (5, 1)), (16, 48, (32, 16)), (16, 47, (32, 15)), (16, 50, (48, 2))]
)
def test_with_a_limit_of_all_but_one_something_is_always_computed(page_size, cached, computed, store):
    cache, tokens = new(100, page_size), list(range(cached))
    store(cache, tokens)
    lease = cache.acquire(tokens, limit=cached - 1)
    assert (lease.cached_tokens, cached - lease.cached_tokens) == computed
    lease.reserve(cached)
    lease.commit(tokens)
    lease.release()
    cache.check()


def test_sequences_that_share_make_as_few_nodes_as_they_must(store):
    cache = new(100, 1)
    for tokens in ([1, 2, 3], [1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 5, 6, 7], [8, 9, 10, 11, 12]):
        store(cache, tokens)
    assert cache.usage == Usage(free=88, evictable=12, locked=0, private=0)
    assert cache.match_length([1, 2, 3, 13, 14]) == 3
    assert count_nodes(cache) == 5


def test_decoding_grows_one_node(store):
    cache = new(100, 1)
    lease = cache.acquire([1, 2])
    for end in range(2, 40):
        lease.reserve(end)
        lease.commit(list(range(1, end + 1)))
    assert count_nodes(cache) == 1
    cache.check()


def test_a_part_page_makes_no_node_and_goes_back(store):
    cache = new(10, 4)
    store(cache, [1, 2, 3])
    assert cache.usage == Usage(free=10, evictable=0, locked=0, private=0)
    store(cache, list(range(10)))
    assert cache.usage == Usage(free=8, evictable=2, locked=0, private=0)


def test_shared_pages_are_few(store):
    cache = new(100, 2)
    store(cache, list(range(1, 9)))
    store(cache, [1, 2, 9, 10])
    assert cache.usage.evictable == 5


def test_locks_reach_to_the_root(store):
    cache = new(10, 1)
    store(cache, [1, 2, 3, 4])
    store(cache, [1, 2, 5])
    first, second = cache.acquire([1, 2, 3, 4]), cache.acquire([1, 2, 5])
    assert (cache.usage.locked, cache.usage.evictable) == (5, 0)
    first.release()
    assert (cache.usage.locked, cache.usage.evictable) == (3, 2)
    second.release()
    assert (cache.usage.locked, cache.usage.evictable) == (0, 5)


def test_a_split_keeps_both_halves_locked_and_the_older_lease_right(store):
    cache = new(10, 1)
    holder = cache.acquire([1, 2, 3, 4])
    holder.reserve(4)
    holder.commit([1, 2, 3, 4])
    table = holder.pages.tolist()
    store(cache, [1, 2, 5])
    assert (cache.usage.locked, cache.usage.evictable) == (4, 1)
    assert holder.pages.tolist() == table
    holder.reserve(5)
    holder.commit([1, 2, 3, 4, 6])
    assert cache.match_length([1, 2, 3, 4, 6]) == 5
    cache.check()
    holder.release()
    assert (cache.usage.locked, cache.usage.evictable) == (0, 6)


def test_eviction_takes_one_page_at_a_time_from_the_end_of_the_oldest_leaf():
    cache, page_of = new(10, 1), {}
    for tokens in ([1, 2, 3, 4], [1, 2, 5]):
        lease = cache.acquire(tokens)
        lease.reserve(len(tokens))
        lease.commit(tokens)
        page_of.update(zip(tokens, lease.pages.tolist(), strict=True))
        lease.release()
    freed = cache.evict(2) + cache.evict(2) + cache.evict(5)
    assert freed == [page_of[token] for token in (4, 3, 5, 2, 1)]
    assert all(type(page) is int for page in freed)
    assert cache.usage == Usage(free=10, evictable=0, locked=0, private=0)


def test_a_match_stamps_what_matched_and_not_the_rest_of_a_split_node(store):
    cache = new(10, 1)
    store(cache, [1, 2, 3, 4])
    store(cache, [5, 6])
    cache.acquire([1, 2]).release()
    cache.evict(2)
    assert (cache.match_length([1, 2, 3, 4]), cache.match_length([5, 6])) == (2, 2)
    cache.evict(2)
    assert (cache.match_length([1, 2]), cache.match_length([5, 6])) == (2, 0)


def test_a_commit_stamps_the_whole_path(store):
    cache = new(10, 1)
    store(cache, [1])
    lease = cache.acquire([1, 2])
    store(cache, [5])
    lease.reserve(2)
    lease.commit([1, 2])
    lease.release()
    cache.evict(2)
    assert (cache.match_length([1, 2]), cache.match_length([5])) == (1, 0)


def test_looking_only_stamps_nothing(store):
    cache = new(10, 1)
    store(cache, [1, 2])
    store(cache, [3, 4])
    assert cache.match_length([1]) == 1
    cache.evict(2)
    assert (cache.match_length([1, 2]), cache.match_length([3, 4])) == (0, 2)
    assert count_nodes(cache) == 1


def test_exactly_the_shortfall_is_evicted(store):
    cache = new(10, 1)
    store(cache, list(range(7)))
    cache.acquire(list(range(100, 105))).reserve(5)
    assert cache.stats.evicted_pages == 2
    assert cache.usage == Usage(free=0, evictable=5, locked=0, private=5)


def test_pages_are_needed_exactly(store):
    cache = new(100, 8)
    store(cache, list(range(8)))
    lease = cache.acquire(list(range(19)))
    lease.reserve(19)
    assert (lease.cached_tokens, cache.usage.private) == (8, 2)
    other = cache.acquire(list(range(50, 65)))
    pages = []
    for length in (15, 16, 17):
        other.reserve(length)
        pages.append(len(other.pages))
    assert pages == [2, 2, 3]


def test_what_cannot_fit_is_refused_with_nothing_changed(store):
    cache = new(4, 1)
    store(cache, [1, 2, 3])
    lease = cache.acquire([1, 2, 3, 4, 5])
    table = lease.pages.tolist()
    with pytest.raises(OutOfPages) as refusal:
        lease.reserve(5)
    assert (refusal.value.needed, refusal.value.free, refusal.value.evictable) == (2, 1, 0)
    assert lease.pages.tolist() == table
    lease.release()
    assert cache.usage == Usage(free=1, evictable=3, locked=0, private=0)
    assert cache.match_length([1, 2, 3]) == 3


def test_a_running_request_shares_what_it_has_committed():
    cache, shared = new(10, 16), list(range(48))
    running = cache.acquire(shared + [100] * 7)
    running.reserve(55)
    running.commit(shared + [100] * 7)
    assert len(running.pages) == 4
    second = cache.acquire(shared + [200] * 5)
    second.reserve(53)
    assert second.cached_tokens == 48
    assert second.pages[:3].tolist() == running.pages[:3].tolist()
    assert cache.usage == Usage(free=5, evictable=0, locked=3, private=2)


def test_every_chunk_can_be_found_as_soon_as_it_is_committed():
    cache, prompt = new(20, 2), list(range(10))
    lease = cache.acquire(prompt)
    lease.reserve(10)
    for end, found in ((4, 4), (8, 8), (10, 10)):
        lease.commit(prompt[:end])
        assert cache.match_length(prompt) == found


@pytest.mark.parametrize(("page_size", "cached"), [(1, 149), (16, 144)])
def test_the_next_turn_finds_prompt_and_answer(page_size, cached, store):
    cache, first = new(400, page_size), list(range(150))
    lease = cache.acquire(first[:100], limit=99)
    lease.reserve(100)
    for end in range(100, 150):
        lease.reserve(end)
        lease.commit(first[:end])
    lease.release()
    assert store(cache, first + list(range(1000, 1050)), limit=199) == cached


@pytest.mark.parametrize(
    ("page_size", "asked", "cached"),
    [
        (1, [*range(60), *range(900, 910)], 60),  # the last answer again
        (16, [*range(60), *range(900, 910)], 48),
        (1, [*range(20), *range(900, 950)], 20),  # the first user message edited, behind a system prompt of 20
        (16, [*range(20), *range(900, 950)], 16),
    ],
)
def test_regenerate_and_edit_hit_the_common_prefix(page_size, asked, cached, store):
    cache = new(400, page_size)
    store(cache, list(range(80)))
    assert store(cache, asked) == cached


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_aborting_after_a_chunk_leaves_nothing_held(page_size):
    cache, prompt = new(40, page_size), list(range(30))
    for _ in range(2):
        lease = cache.acquire(prompt, limit=29)
        lease.reserve(30)
        lease.commit(prompt[:10] if lease.cached_tokens < 10 else prompt[: lease.cached_tokens])
        lease.release()
        assert (cache.usage.locked, cache.usage.private) == (0, 0)
        assert cache.usage.total == 40
        assert cache.match_length(prompt) == 10 - 10 % page_size
        cache.check()


def test_the_first_writer_wins_and_the_duplicates_go_back():
    cache = new(10, 2)
    first, second = cache.acquire([1, 2, 3, 4, 5]), cache.acquire([1, 2, 3, 4, 6, 7])
    for lease, tokens in ((first, [1, 2, 3, 4, 5]), (second, [1, 2, 3, 4, 6, 7])):
        lease.reserve(len(tokens))
        lease.commit(tokens)
    assert second.pages[:2].tolist() == first.pages[:2].tolist()
    assert second.pages[2] != first.pages[2]
    assert cache.stats.duplicate_pages == 2
    assert cache.usage == Usage(free=6, evictable=0, locked=3, private=1)
    cache.check()


def test_a_node_that_got_a_child_is_not_extended_in_place(store):
    cache = new(10, 1)
    first = cache.acquire([1])
    first.reserve(2)
    first.commit([1])
    store(cache, [1, 2], limit=0)
    first.commit([1, 3])
    cache.check()
    assert [cache.match_length(tokens) for tokens in ([1, 2], [1, 3])] == [2, 2]
    assert count_nodes(cache) == 3


def test_reset_waits_for_the_last_lease(store):
    cache = new(10, 1)
    store(cache, [1, 2, 3])
    lease = cache.acquire([9])
    assert cache.reset() is False
    assert cache.match_length([1, 2, 3]) == 3
    lease.release()
    assert cache.reset() is True
    assert cache.usage == Usage(free=10, evictable=0, locked=0, private=0)
    assert cache.match_length([1, 2, 3]) == 0
    cache.check()
