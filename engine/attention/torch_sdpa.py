"""Paged attention with torch's scaled_dot_product_attention, for the CPU.

Gathering a sequence from its pages in every layer of every step would cost more than attending to it. So each running
sequence has a contiguous, head-major working copy of its keys and values: filled once from the pool when the sequence
arrives, appended to by every step. Only pages that a step has completed are written back to the pool, all layers in one
go: a page that is not full is never shared, so nobody else needs it there.

    pool     [2, layers, kv_heads, slots, head_dim]      slot = page * page_size + offset
    working  [2, layers, kv_heads, capacity, head_dim]   one for each running sequence
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from cache import TailCopy
from engine.attention.base import AttentionRow, KVShape


@dataclass(frozen=True, slots=True)
class _PlannedRow:
    """tokens: the row's part of the flat step. mask: [count, start + count] of the K/V dtype, None for a single token
    and for a row without a past, where causality alone says it."""

    row: AttentionRow
    tokens: slice
    working: torch.Tensor
    mask: torch.Tensor | None


class TorchAttention:
    """The AttentionBackend for CPUs. Holds the pool: num_pages * page_bytes bytes, touched as it fills."""

    def __init__(self, shape: KVShape) -> None:
        self._shape = shape
        slots = shape.num_pages * shape.page_size
        self._pool = torch.empty((2, shape.num_layers, shape.num_kv_heads, slots, shape.head_dim), dtype=shape.dtype)
        self._working: dict[int, torch.Tensor] = {}
        self._planned: list[_PlannedRow] = []

    def plan(self, rows: Sequence[AttentionRow]) -> None:
        planned, offset = [], 0
        for row in rows:
            working = self._working.get(row.sequence)
            if working is None:
                working = self._working[row.sequence] = self._fill(row)
            mask = _causal_mask(row.start, row.count, self._shape.dtype) if row.start and row.count > 1 else None
            planned.append(_PlannedRow(row, slice(offset, offset + row.count), working, mask))
            offset += row.count
        self._planned = planned

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        dtype = self._shape.dtype
        keys, values, queries = k.to(dtype).transpose(0, 1), v.to(dtype).transpose(0, 1), q.to(dtype)
        out = torch.empty_like(q)
        for planned in self._planned:
            row, tokens = planned.row, planned.tokens
            end = row.start + row.count
            sequence_keys, sequence_values = planned.working[0, layer], planned.working[1, layer]
            sequence_keys[:, row.start : end] = keys[:, tokens]
            sequence_values[:, row.start : end] = values[:, tokens]
            out[tokens] = _attend(queries[tokens], sequence_keys[:, :end], sequence_values[:, :end], planned.mask)
        if layer == self._shape.num_layers - 1:
            for planned in self._planned:
                self._store_full_pages(planned)
        return out

    def fork(self, source: int, target: int, tokens: int, tail: TailCopy | None) -> None:
        """Copies the working copy alone: a page that is not full is in no pool, so `tail` moves nothing there."""
        original = self._working[source]
        copy = self._working[target] = torch.empty_like(original)
        copy[..., :tokens, :] = original[..., :tokens, :]

    def drop(self, sequence: int) -> None:
        self._working.pop(sequence, None)

    def _fill(self, row: AttentionRow) -> torch.Tensor:
        """A working copy that holds the row's past. Its memory is only touched as far as it is filled."""
        two, layers, heads, _, head_dim = self._pool.shape
        working = torch.empty((two, layers, heads, row.capacity, head_dim), dtype=self._shape.dtype)
        size = self._shape.page_size
        for first, last in _runs(row.pages[: -(-row.start // size)]):
            start, end = first * size, min(last * size, row.start)
            slot = int(row.pages[first]) * size
            working[..., start:end, :] = self._pool[..., slot : slot + end - start, :]
        return working

    def _store_full_pages(self, planned: _PlannedRow) -> None:
        row, size = planned.row, self._shape.page_size
        full, before = (row.start + row.count) // size, row.start // size
        for first, last in _runs(row.pages[before:full]):
            start, end = (before + first) * size, (before + last) * size
            slot = int(row.pages[before + first]) * size
            self._pool[..., slot : slot + end - start, :] = planned.working[..., start:end, :]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """[T, Hq, D] against [Hkv, S, D]; a single token without a mask, or T = S, which is plainly causal."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[0]
    if tokens == 1:
        # The query heads of a group see the same keys: as rows of one small product they read them once.
        grouped = q.view(1, kv_heads, heads // kv_heads, head_dim)
        return F.scaled_dot_product_attention(grouped, k[None], v[None]).view(1, heads, head_dim)
    queries = q.transpose(0, 1)[None]
    attended = F.scaled_dot_product_attention(
        queries, k[None], v[None], attn_mask=mask, is_causal=mask is None, enable_gqa=heads != kv_heads
    )
    return attended[0].transpose(0, 1)


def _causal_mask(start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """[count, start + count]: token i of the chunk sees the positions up to start + i."""
    return torch.full((count, start + count), float("-inf"), dtype=dtype).triu_(start + 1)


def _runs(pages: npt.NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """[first, last) index ranges in which the page numbers are adjacent."""
    if len(pages) == 0:
        return
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    bounds = [0, *breaks.tolist(), len(pages)]
    yield from pairwise(bounds)
