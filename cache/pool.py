"""The pages of the KV pool that nobody uses, kept as runs of adjacent ids."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from cache.errors import CacheCorruption, OutOfPages
from cache.tokens import PageIds


class PagePool:
    """Hands out page ids, 0 to num_pages - 1, adjacent ones first. page_size in tokens.

    A sequence that grows gets the pages behind its last one while they are free. One that starts anew starts in the
    middle of the longest run, so that the sequence before that run keeps room to grow. Both calls cost
    O(runs touched * log runs).

        runs        [start, end) of every maximal stretch of free pages
        heap        (-length, start), newest entry per run valid, older ones dropped when they surface
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError("num_pages and page_size must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self._is_free = np.ones(num_pages, np.bool_)
        self._free_pages = 0
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._add_run(0, num_pages)

    @property
    def free_pages(self) -> int:
        return self._free_pages

    def alloc(self, n_pages: int, after: int | None = None) -> PageIds:
        """`n_pages` page ids, ascending within each run; behind page `after` where that is free.

        Raises OutOfPages, and takes nothing, when fewer are free.
        """
        if n_pages > self._free_pages:
            raise OutOfPages(n_pages, self._free_pages, 0)
        parts: list[PageIds] = []
        missing = n_pages
        if after is not None and (end := self._end_of.get(after + 1)) is not None:
            parts.append(self._carve(after + 1, end, after + 1, min(missing, end - after - 1)))
            missing -= len(parts[0])
        while missing > 0:
            start, end = self._longest_run()
            size = min(missing, end - start)
            room_before = (end - start - size) // 2 if start > 0 else 0
            parts.append(self._carve(start, end, start + room_before, size))
            missing -= size
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def free(self, pages: npt.ArrayLike) -> None:
        """Takes pages back, in any order. Raises CacheCorruption, and takes nothing, if one is free already."""
        ids = np.sort(np.asarray(pages, np.int32))
        if ids.size == 0:
            return
        if ids[0] < 0 or ids[-1] >= self.num_pages or self._is_free[ids].any() or (ids[1:] == ids[:-1]).any():
            raise CacheCorruption("a page was freed that was free already, or that does not exist")
        gaps = np.flatnonzero(np.diff(ids) != 1)
        firsts = [int(ids[0]), *ids[gaps + 1].tolist()]
        lasts = [*ids[gaps].tolist(), int(ids[-1])]
        for first, last in zip(firsts, lasts, strict=True):
            start, end = first, last + 1
            if (before := self._start_of.get(start)) is not None:
                self._drop_run(before, start)
                start = before
            if (behind := self._end_of.get(end)) is not None:
                self._drop_run(end, behind)
                end = behind
            self._add_run(start, end)
        self._is_free[ids] = True

    def check(self) -> PageIds:
        """The free pages, ascending. Raises CacheCorruption if the runs do not spell exactly them."""
        spelt = np.zeros(self.num_pages, np.bool_)
        for start, end in self._end_of.items():
            if self._start_of.get(end) != start or end in self._end_of or spelt[start:end].any():
                raise CacheCorruption(f"the free run {start}:{end} touches or overlaps another one")
            spelt[start:end] = True
        ids = np.flatnonzero(self._is_free).astype(np.int32)
        if (spelt != self._is_free).any() or len(ids) != self._free_pages or len(self._start_of) != len(self._end_of):
            raise CacheCorruption("the free runs and the free pages differ")
        return ids

    def _carve(self, start: int, end: int, first: int, size: int) -> PageIds:
        """Takes `size` pages from `first` on out of the run [start, end)."""
        self._drop_run(start, end)
        if start < first:
            self._add_run(start, first)
        if first + size < end:
            self._add_run(first + size, end)
        self._is_free[first : first + size] = False
        return np.arange(first, first + size, dtype=np.int32)

    def _longest_run(self) -> tuple[int, int]:
        while True:
            length, start = self._heap[0]
            end = start - length
            if self._end_of.get(start) == end:
                return start, end
            heapq.heappop(self._heap)

    def _add_run(self, start: int, end: int) -> None:
        self._end_of[start], self._start_of[end] = end, start
        self._free_pages += end - start
        if len(self._heap) > 2 * len(self._end_of) + 64:
            self._heap = [(s - e, s) for s, e in self._end_of.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (start - end, start))

    def _drop_run(self, start: int, end: int) -> None:
        del self._end_of[start], self._start_of[end]
        self._free_pages -= end - start
