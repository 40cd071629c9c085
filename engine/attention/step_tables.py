"""The page tables of a step in the form that paged kernels read: flat int32 arrays with offsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.base import AttentionRow

Ints: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of R rows. token_offsets and key_offsets: see StepTables, int32 [R + 1] on the device. most_tokens, most_keys: of
    one row."""

    token_offsets: torch.Tensor
    key_offsets: torch.Tensor
    most_tokens: int
    most_keys: int


@dataclass(frozen=True, slots=True)
class StepTables:
    """R rows with T tokens in all.

    token_offsets    [R + 1]   row r has the flat tokens token_offsets[r] .. token_offsets[r + 1] - 1
    page_offsets     [R + 1]   and the pages pages[page_offsets[r] : page_offsets[r + 1]], never none
    pages            [N]       page numbers, in the order of the sequences
    last_page_len    [R]       slots in use of a row's last page, 1 .. page_size
    token_rows       [T]       the row of each flat token
    positions        [T]       its place in its sequence
    key_offsets      [R + 1]   as token_offsets, of all tokens of the sequences: those that are attended to
    fresh            [F]       pages that the step begins to fill and does not fill: what is left is stale
    """

    token_offsets: Ints
    page_offsets: Ints
    pages: Ints
    last_page_len: Ints
    token_rows: Ints
    positions: Ints
    key_offsets: Ints
    fresh: Ints

    @property
    def single(self) -> bool:
        """Every row computes one token."""
        return len(self.positions) == len(self.last_page_len)

    @classmethod
    def build(cls, rows: Sequence[AttentionRow], page_size: int) -> StepTables:
        """Raises ValueError for an empty step, a row without tokens, or one whose page table is too short."""
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.count for row in rows], dtype=np.int64)
        ends = starts + counts
        needed = -(-ends // page_size)
        _check(rows, counts, needed)
        token_offsets, page_offsets = offsets(counts), offsets(needed)
        tables = [row.pages[:count] for row, count in zip(rows, needed.tolist(), strict=True)]
        pages = np.concatenate(tables).astype(np.int32, copy=False)
        last_page_len = (ends - 1) % page_size + 1
        begun = (last_page_len < page_size) & (ends - last_page_len >= starts)
        return cls(
            token_offsets,
            page_offsets,
            pages,
            last_page_len.astype(np.int32),
            np.repeat(np.arange(len(rows), dtype=np.int32), counts),
            (np.arange(token_offsets[-1]) - np.repeat(token_offsets[:-1] - starts, counts)).astype(np.int32),
            offsets(ends),
            pages[page_offsets[1:][begun] - 1],
        )

    def lengths(self, token_offsets: torch.Tensor, key_offsets: torch.Tensor) -> Lengths:
        """token_offsets, key_offsets: its own, on the device."""
        return Lengths(
            token_offsets, key_offsets, int(np.diff(self.token_offsets).max()), int(np.diff(self.key_offsets).max())
        )

    def key_slots(self, page_size: int) -> Ints:
        """[sum of all lengths]: slot = page * page_size + offset of each key, sequence by sequence."""
        lengths = np.diff(self.key_offsets)
        positions = np.arange(self.key_offsets[-1]) - np.repeat(self.key_offsets[:-1], lengths)
        pages = self.pages[np.repeat(self.page_offsets[:-1], lengths) + positions // page_size]
        return _slots(pages, positions, page_size)

    def token_slots(self, page_size: int) -> Ints:
        """[T]: the slot of each flat token, where its key and value go."""
        pages = self.pages[self.page_offsets[self.token_rows] + self.positions // page_size]
        return _slots(pages, self.positions, page_size)

    def block_table(self) -> Ints:
        """[R * M], seen as [R, M]: the pages of each row, filled up to the longest with the row's own last page."""
        counts = np.diff(self.page_offsets)
        columns = np.minimum(np.arange(counts.max())[None], counts[:, None] - 1)
        table: Ints = self.pages[self.page_offsets[:-1, None] + columns].ravel()
        return table


def _check(rows: Sequence[AttentionRow], counts: npt.NDArray[np.int64], needed: npt.NDArray[np.int64]) -> None:
    if len(rows) == 0:
        raise ValueError("a step without rows")
    if counts.min() < 1:
        raise ValueError("a row that computes no token")
    for row, count in zip(rows, needed.tolist(), strict=True):
        if len(row.pages) < count:
            tokens = row.start + row.count
            raise ValueError(f"{tokens} tokens need {count} pages, and sequence {row.sequence} has {len(row.pages)}")


def _slots(pages: Ints, positions: npt.NDArray[np.integer[Any]], page_size: int) -> Ints:
    slots: Ints = pages * page_size + (positions % page_size).astype(np.int32)
    return slots


def offsets(counts: npt.NDArray[np.integer[Any]]) -> Ints:
    """0, the first of the counts, the sum of the first two, ..., the sum of all."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
