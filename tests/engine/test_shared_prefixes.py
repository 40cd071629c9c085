"""Which rows of a step share pages, beside a naive search over sets, and the tables that come of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.attention import AttentionRow
from engine.attention.shared_prefixes import Group, SharedPrefixes
from engine.attention.step_tables import StepTables

PAGE_SIZE = 4
Table = list[int]


def row(pages: Table, start: int, number: int = 0) -> AttentionRow:
    return AttentionRow(number, np.array(pages, dtype=np.int32), start, 1, 1000)


def rows_of(*tables: tuple[Table, int]) -> list[AttentionRow]:
    """Each with its pages and the place of its token; numbered from 100 on."""
    return [row(pages, start, 100 + number) for number, (pages, start) in enumerate(tables)]


def find(rows: list[AttentionRow], least: int = 1, most_groups: int = 99, page_size: int = PAGE_SIZE) -> Any:
    return SharedPrefixes.find(StepTables.build(rows, page_size), page_size, least, most_groups)


def groups_of(rows: list[AttentionRow], page_size: int = PAGE_SIZE) -> list[tuple[tuple[int, ...], int]]:
    found = find(rows, page_size=page_size)
    return [(group.rows, group.pages) for group in found.groups] if found is not None else []


@pytest.mark.parametrize(
    ("tables", "groups"),
    [
        ([([1, 2], 5)], []),
        ([([1, 2], 5), ([3, 4], 5)], []),
        ([([1, 2], 5), ([1, 3], 5)], [((0, 1), 1)]),
        ([([1, 2], 5), ([9, 8], 5), ([1, 3], 5)], [((0, 2), 1)]),  # not beside each other
        ([([1, 2, 3], 9), ([1, 2, 4], 10), ([1, 2, 5], 11)], [((0, 1, 2), 2)]),
        ([([1], 3), ([1, 3], 5)], []),  # the first writes to page 1: it is not full
        ([([1, 2], 4), ([1, 3], 7)], [((0, 1), 1)]),  # page 1 has just been filled
        ([([1, 2], 3), ([1, 2], 3)], []),  # a step that nobody should plan: both write to page 1
        ([([7, 1, 2], 9), ([8, 1, 2], 9)], []),  # alike, but not from the beginning
        ([([1, 2, 3, 4], 12), ([1, 2, 3, 5], 13), ([1, 6], 4), ([1, 7], 4)], [((0, 1), 3), ((2, 3), 1)]),
        ([([1, 2, 3], 8), ([1, 2, 4], 9), ([1, 5], 4), ([1, 6], 4), ([1, 7], 4)], [((0, 1, 2, 3, 4), 1)]),
        ([([1, 2], 5), ([3, 4], 5), ([1, 5], 5), ([3, 6, 7], 9)], [((0, 2), 1), ((1, 3), 1)]),
    ],
)
def test_groups(tables: list[tuple[Table, int]], groups: list[tuple[tuple[int, ...], int]]) -> None:
    assert sorted(groups_of(rows_of(*tables))) == groups


def naive(tables: list[tuple[Table, int]], outer: int = 0) -> tuple[list[tuple[tuple[int, ...], int]], list[int]]:
    """By a tree of pages: the groups, and the rows that are left to share `outer` pages. tables: full pages, number."""
    depth = outer
    while all(len(pages) > depth for pages, _ in tables) and len({pages[depth] for pages, _ in tables}) == 1:
        depth += 1
    groups, together = [], [number for pages, number in tables if len(pages) == depth]
    nexts = {pages[depth]: None for pages, _ in tables if len(pages) > depth}
    for page in nexts:
        below = [(pages, number) for pages, number in tables if len(pages) > depth and pages[depth] == page]
        if len(below) == 1:
            together.append(below[0][1])
        else:
            found, left = naive(below, depth)
            groups += found
            together += left
    if (len(together) - 1) * depth > len(together) * outer:
        return [*groups, (tuple(sorted(together)), depth)], []
    return groups, together


@pytest.mark.parametrize("seed", range(150))
@pytest.mark.parametrize("page_size", [1, 4])
def test_groups_are_those_of_a_naive_search(page_size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    tables: list[tuple[Table, int]] = []
    fresh = iter(range(1000, 100_000))
    for _ in range(int(random.integers(1, 14))):
        other, start = tables[int(random.integers(len(tables)))] if tables and random.random() < 0.8 else ([], 0)
        shared = int(random.integers(0, start // page_size + 1))
        length = int(random.integers(shared * page_size, 12 * page_size))
        pages = other[:shared] + [next(fresh) for _ in range(length // page_size + 1 - shared)]
        tables.append((pages, length))
    full = [(pages[: start // page_size], number) for number, (pages, start) in enumerate(tables)]
    found = groups_of(rows_of(*tables), page_size)
    assert sorted(found) == sorted(naive(full)[0])
    for members, pages in found:
        heads = [tables[member][0][:pages] for member in members]
        assert all(head == heads[0] for head in heads)
        assert all(tables[member][1] // page_size >= pages for member in members)


@pytest.mark.parametrize(("least", "worth"), [(1, True), (16, True), (17, False)])
def test_what_is_worth_it(least: int, worth: bool) -> None:
    """Three rows save twice two pages of four tokens."""
    rows = rows_of(([1, 2, 3], 9), ([1, 2, 4], 10), ([1, 2, 5], 11))
    assert (find(rows, least) is not None) == worth


def test_nothing_is_never_worth_it() -> None:
    assert find(rows_of(([1], 0), ([2], 0))) is None


def test_of_too_many_groups_those_that_save_most() -> None:
    rows = rows_of(([1, 9], 4), ([1, 8], 4), ([2, 3, 7], 8), ([2, 3, 6], 8), ([4, 11], 4), ([4, 12], 4), ([4, 13], 4))
    found = find(rows, most_groups=2)
    assert found.groups == (Group((2, 3), 2), Group((4, 5, 6), 1))
    _, shared = found.parts()
    assert shared.order.tolist() == [2, 3, 4, 5, 6, 0, 1]
    assert shared.order[shared.inverse].tolist() == list(range(7))


def test_tables_of_both_parts() -> None:
    """Rows 0 and 2 share pages 1 and 2, row 1 shares nothing; a fourth and a fifth share page 7."""
    rows = rows_of(([1, 2, 3], 9), ([5], 2), ([1, 2, 4, 6], 14), ([7, 8, 99], 7), ([7, 9], 4))
    found = find(rows)
    own, shared = found.parts()
    assert shared.order.tolist() == [0, 2, 3, 4, 1]
    assert own.page_offsets.tolist() == [0, 1, 3, 4, 5, 6]
    assert own.pages.tolist() == [3, 4, 6, 8, 9, 5]
    assert own.last_page_len.tolist() == [2, 3, 4, 1, 3]
    assert own.token_rows.tolist() == [0, 4, 1, 2, 3]
    assert own.positions.tolist() == [1, 2, 6, 3, 0]
    whole = StepTables.build(rows, PAGE_SIZE)
    assert own.token_slots(PAGE_SIZE).tolist() == whole.token_slots(PAGE_SIZE).tolist()
    assert own.fresh.tolist() == whole.fresh.tolist()
    assert own.key_offsets.tolist() == [0, 2, 9, 13, 14, 17]
    assert shared.query_offsets.tolist() == [0, 2, 4, 5]
    assert shared.page_offsets.tolist() == [0, 2, 3, 3]
    assert shared.pages.tolist() == [1, 2, 7]
    assert shared.last_page_len.tolist() == [4, 4, 4]
    filled = found.parts(requests=5)[1]
    assert filled.query_offsets.tolist() == [0, 2, 4, 5, 5, 5]
    assert filled.page_offsets.tolist() == [0, 2, 3, 3, 3, 3]
    assert len(filled.last_page_len) == 5
    assert all(getattr(filled, name).dtype == np.int32 for name in filled.__slots__)


def test_no_request_for_the_rest_where_there_is_none() -> None:
    rows = rows_of(([1, 2], 4), ([1, 3], 4))
    found = find(rows)
    assert found.parts()[1].query_offsets.tolist() == [0, 2]
