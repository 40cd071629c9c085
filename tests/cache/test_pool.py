"""Runs of free pages."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import CacheCorruption, OutOfPages, PagePool


def runs(pages: list[int]) -> int:
    return 1 + sum(right != left + 1 for left, right in pairwise(pages))


def test_one_allocation_is_one_run_where_there_is_one_long_enough():
    pool = PagePool(100, 16)
    assert pool.alloc(10).tolist() == list(range(10))
    assert runs(pool.alloc(50).tolist()) == 1
    assert pool.alloc(0).tolist() == []


def test_a_growing_sequence_stays_one_run_beside_others():
    pool = PagePool(1000, 1)
    tables = [pool.alloc(20).tolist() for _ in range(8)]
    for _ in range(50):
        for table in tables:
            table += pool.alloc(1, after=table[-1]).tolist()
    assert [runs(table) for table in tables] == [1] * 8


def test_freed_neighbours_become_one_run_again():
    pool = PagePool(10, 1)
    pages = pool.alloc(10).tolist()
    for page in (3, 5, 4, 9, 0):
        pool.free([page])
    assert pool.alloc(3).tolist() == [3, 4, 5]
    pool.free([3, 4, 5])
    pool.free([page for page in pages if page not in (0, 3, 4, 5, 9)])
    assert pool.alloc(10).tolist() == list(range(10))


def test_what_does_not_fit_in_one_run_takes_the_longest_ones():
    pool = PagePool(10, 1)
    pool.alloc(10)
    pool.free([0, 1, 2, 4, 5, 7])
    assert pool.alloc(5).tolist() == [0, 1, 2, 4, 5]


def test_more_than_is_free_is_refused():
    pool = PagePool(4, 1)
    pool.alloc(1)
    with pytest.raises(OutOfPages):
        pool.alloc(4)
    assert pool.free_pages == 3


@pytest.mark.parametrize("pages", [[0], [7], [5, 5], [8], [-1]])
def test_freeing_what_is_not_out_is_an_error_and_takes_nothing(pages):
    pool = PagePool(8, 1)
    pool.alloc(7)
    with pytest.raises(CacheCorruption):
        pool.free([4, *pages] if pages != [0] else [0, 0])
    assert pool.free_pages == 1
    pool.check()


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 1), (1, 0), (-1, 1)])
def test_a_pool_has_pages_of_tokens(num_pages, page_size):
    with pytest.raises(ValueError, match="at least 1"):
        PagePool(num_pages, page_size)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["fresh", "grow", "free", "trim"]), st.integers(0, 9)), max_size=80))
def test_runs_always_spell_the_free_pages(steps):
    pool, tables = PagePool(40, 1), [[]]
    for action, number in steps:
        table = tables[number % len(tables)]
        if action in ("fresh", "grow") and number <= pool.free_pages:
            after = table[-1] if action == "grow" and table else None
            table = table if action == "grow" else []
            table += pool.alloc(number, after).tolist()
            tables.append(table)
        elif action == "free":
            pool.free(table[::-1])
            table.clear()
        elif action == "trim":
            pool.free(table[-2:])
            del table[-2:]
        held = {page for table in tables for page in table}
        assert pool.check().tolist() == sorted(set(range(40)) - held)
