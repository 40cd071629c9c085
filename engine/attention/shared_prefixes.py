"""Which rows of a step begin with the same pages, found from their page tables alone.

    rows    a: 3 7 9 | 1        b: 3 7 | 4        c: 3 7 9 | 8        d: 5 | 2          | what follows is not full
    groups  a, c share 3 7 9                      or a, b, c share 3 7

A row is in one group at most, so rows that share much with a few and little with many have to decide. Whether a group
of n rows with d pages in common stays by itself, or joins others with which it has only d' in common, is a matter of
pages that need not be read: (n - 1) * d by itself, n * d' more with the others.

Only pages before the one that a row writes to count: they are full, and nobody writes to them any more. What a page
holds follows from all tokens up to its end; so rows with the same page at the same place have all in common that is
before it, and how much two rows share is found by halving.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from engine.attention.step_tables import Ints, StepTables, offsets


@dataclass(frozen=True, slots=True)
class Group:
    """rows: their places in the step, at least two. pages: how many they all begin with."""

    rows: tuple[int, ...]
    pages: int

    @property
    def saved(self) -> int:
        """Pages that need not be read."""
        return (len(self.rows) - 1) * self.pages


@dataclass(frozen=True, slots=True)
class SharedTables:
    """What each group shares, as a request with all its rows; then the rows of none, as one without keys.

    query_offsets  [Q + 1]  request g has the queries query_offsets[g] .. query_offsets[g + 1] - 1, in `order`
    page_offsets   [Q + 1]  and sees all of pages[page_offsets[g] : page_offsets[g + 1]]
    pages          [N]
    last_page_len  [Q]      page_size: all are full
    order          [R]      the rows in the order of their groups, those of none last
    inverse        [R]      where each row is in `order`
    """

    query_offsets: Ints
    page_offsets: Ints
    pages: Ints
    last_page_len: Ints
    order: Ints
    inverse: Ints


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Of a step of single tokens. tables: of the whole step. groups: disjoint."""

    tables: StepTables
    page_size: int
    groups: tuple[Group, ...]

    @classmethod
    def find(cls, tables: StepTables, page_size: int, least: int, most_groups: int) -> SharedPrefixes | None:
        """None where fewer than `least` tokens (at least 1) need not be read; of more than `most_groups` groups, those
        that save most."""
        found = _groups(tables, page_size, -(-least // page_size))
        groups = sorted(found, key=lambda group: group.saved, reverse=True)[:most_groups]
        if sum(group.saved for group in groups) * page_size < least:
            return None
        return cls(tables, page_size, tuple(groups))

    def parts(self, requests: int | None = None) -> tuple[StepTables, SharedTables]:
        """What each row has for itself, and what groups share.

        The page tables of the first are in the order of the groups, its tokens in that of the step, and their positions
        count from the row's own first page on. requests: of the second, the last ones empty; None: as many as needed.
        """
        order, inverse = self._order()
        return self._own(order, inverse), self._shared(order, inverse, requests)

    def _order(self) -> tuple[Ints, Ints]:
        rows = len(self.tables.positions)
        grouped = [row for group in self.groups for row in group.rows]
        alone = np.ones(rows, dtype=bool)
        alone[grouped] = False
        order = np.concatenate((grouped, np.flatnonzero(alone))).astype(np.int32)
        inverse = np.empty_like(order)
        inverse[order] = np.arange(rows, dtype=np.int32)
        return order, inverse

    def _own(self, order: Ints, inverse: Ints) -> StepTables:
        whole, skipped = self.tables, np.zeros(len(order), dtype=np.int32)
        for group in self.groups:
            skipped[list(group.rows)] = group.pages
        counts, first = (np.diff(whole.page_offsets) - skipped)[order], (whole.page_offsets[:-1] + skipped)[order]
        lengths = (counts - 1) * self.page_size + whole.last_page_len[order]
        page_offsets = offsets(counts)
        pages = whole.pages[np.arange(page_offsets[-1]) + np.repeat(first - page_offsets[:-1], counts)]
        return replace(
            whole,
            page_offsets=page_offsets,
            pages=pages,
            last_page_len=whole.last_page_len[order],
            token_rows=inverse,
            positions=whole.positions - skipped * np.int32(self.page_size),
            key_offsets=offsets(lengths),
        )

    def _shared(self, order: Ints, inverse: Ints, requests: int | None) -> SharedTables:
        counts = [len(group.rows) for group in self.groups]
        queries, pages = offsets(np.array(counts)), offsets(np.array([group.pages for group in self.groups]))
        if queries[-1] < len(order):
            queries, pages = np.append(queries, np.int32(len(order))), np.append(pages, pages[-1])
        if requests is not None:
            queries, pages = (np.pad(x, (0, requests + 1 - len(x)), mode="edge") for x in (queries, pages))
        starts = [(int(self.tables.page_offsets[group.rows[0]]), group.pages) for group in self.groups]
        read = np.concatenate([self.tables.pages[start : start + count] for start, count in starts])
        last = np.full(len(queries) - 1, self.page_size, dtype=np.int32)
        return SharedTables(queries, pages, read, last, order, inverse)


def _groups(tables: StepTables, page_size: int, least: int) -> list[Group]:
    """least: pages to save in all; fewer need not be found."""
    full = tables.positions // page_size
    firsts = np.where(full > 0, tables.pages[tables.page_offsets[:-1]], -1).tolist()
    counts = Counter(firsts)
    members = [row for row, first in enumerate(firsts) if first >= 0 and counts[first] > 1]
    if not members or (len(members) - 1) * np.partition(full[members], -2)[-2] < least:  # nobody shares more
        return []
    pages, width = tables.pages.tobytes(), tables.pages.itemsize  # of bytes, slices are cheap and have an order
    spans = zip((tables.page_offsets[:-1] * width).tolist(), (full * width).tolist(), strict=True)
    keys = [pages[start : start + size] for start, size in spans]
    members.sort(key=keys.__getitem__)
    return _nested(members, [0, *_in_common(tables, full, np.array(members)).tolist(), 0])


def _in_common(tables: StepTables, full: Ints, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """[len(rows) - 1]: how many full pages each row begins alike with the next one."""
    before = tables.page_offsets[rows].astype(np.intp) - 1  # so that before + n is the place of the n-th page
    left, right = before[:-1], before[1:]
    most = np.minimum(full[rows[:-1]], full[rows[1:]])
    found = np.zeros(len(left), dtype=np.intp)
    for bit in reversed(range(int(most.max()).bit_length())):
        more = found | (1 << bit)
        there = np.minimum(more, most)  # any place that may be read
        alike = tables.pages.take(left + there) == tables.pages.take(right + there)
        found = np.where(alike & (more <= most), more, found)
    return found


def _nested(rows: Sequence[int], depths: Sequence[int]) -> list[Group]:
    """rows: sorted by their pages. depths: what each has in common with the one before, and at the end 0.

    open: rows that have so many pages in common, the innermost last. Once no further row has as many in common, the
    innermost becomes a group, or goes up into what is around it.
    """
    groups: list[Group] = []
    open_: list[tuple[int, list[int]]] = [(0, [])]
    for row, depth in zip(rows, depths[1:], strict=True):
        if depth > open_[-1][0]:
            open_.append((depth, []))
        open_[-1][1].append(row)
        while open_[-1][0] > depth:
            common, together = open_.pop()
            around = max(depth, open_[-1][0])
            if (len(together) - 1) * common > len(together) * around:
                groups.append(Group(tuple(sorted(together)), common))
                together = []
            if open_[-1][0] < around:
                open_.append((around, []))
            open_[-1][1].extend(together)
    return groups
