"""Paged attention with torch's scaled_dot_product_attention, for the CPU.

Gathering a sequence from its pages in every layer of every step would cost more than attending to it. So each running
sequence has a contiguous, head-major working copy of its keys and values: filled once from the pool when the sequence
arrives, appended to by every step. Only pages that a step has completed are written back to the pool, all layers in one
go: a page that is not full is never shared, so nobody else needs it there. A page that was completed by guesses which
were not kept is completed, and written, once more before it can be shared. A sequence whose page table is empty lives
in its working copy alone. How the pool stores pages is its own affair (engine/attention/kv_pool.py); a working copy is
in the pool's dtype and holds what the pool would give back.

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
from engine.attention.base import AttentionRow, KVShape, LayerAttention
from engine.attention.kv_pool import make_pool
from engine.attention.visible import Visible, visible


@dataclass(frozen=True, slots=True)
class _PlannedRow:
    """tokens: the row's part of the flat step. visible: what they see, for each kind of layer of the model."""

    row: AttentionRow
    tokens: slice
    working: torch.Tensor
    visible: tuple[Visible, ...]


class TorchAttention:
    """The AttentionBackend for CPUs. Holds the pool: num_pages * page_bytes bytes, touched as it fills.

    layers: one for each layer of the shape; None: all of them plain.
    """

    def __init__(self, shape: KVShape, layers: Sequence[LayerAttention] | None = None) -> None:
        self._shape = shape
        self._layers = tuple(layers) if layers is not None else (LayerAttention(),) * shape.num_layers
        if len(self._layers) != shape.num_layers:
            raise ValueError(f"{shape.num_layers} layers, but the attention of {len(self._layers)}")
        kinds = [(layer.window, layer.softcap is not None) for layer in self._layers]
        self._kinds = tuple(dict.fromkeys(kinds))
        self._kind_of = tuple(self._kinds.index(kind) for kind in kinds)
        self._pool = make_pool(shape)
        self._working: dict[int, torch.Tensor] = {}
        self._planned: list[_PlannedRow] = []

    def plan(self, rows: Sequence[AttentionRow]) -> None:
        planned, offset = [], 0
        for row in rows:
            working = self._working.get(row.sequence)
            if working is None:
                working = self._working[row.sequence] = self._fill(row)
            seen = tuple(visible(row, window, self._pool.dtype, explicit=capped) for window, capped in self._kinds)
            planned.append(_PlannedRow(row, slice(offset, offset + row.count), working, seen))
            offset += row.count
        self._planned = planned

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        queries, stored = q.to(self._pool.dtype), self._pool.rounded(k, v).transpose(1, 2)
        out, kind = torch.empty_like(q), self._kind_of[layer]
        for planned in self._planned:
            row, tokens = planned.row, planned.tokens
            end = row.start + row.count
            working, seen = planned.working[:, layer], planned.visible[kind]
            working[:, :, row.start : end] = stored[:, :, tokens]
            keys, values = working[:, :, seen.first : end].unbind()
            out[tokens] = _attend(queries[tokens], keys, values, seen.mask, self._layers[layer])
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
        shape, size = self._shape, self._shape.page_size
        sizes = (2, shape.num_layers, shape.num_kv_heads, row.capacity, shape.head_dim)
        working = torch.empty(sizes, dtype=self._pool.dtype)
        for first, last in _runs(row.pages[: -(-row.start // size)]):
            start, end = first * size, min(last * size, row.start)
            slot = int(row.pages[first]) * size
            self._pool.read(slot, working[..., start:end, :])
        return working

    def _store_full_pages(self, planned: _PlannedRow) -> None:
        row, size = planned.row, self._shape.page_size
        full, before = (row.start + row.count) // size, row.start // size
        for first, last in _runs(row.pages[before:full]):
            start, end = (before + first) * size, (before + last) * size
            slot = int(row.pages[before + first]) * size
            self._pool.write(slot, planned.working[..., start:end, :])


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, options: LayerAttention
) -> torch.Tensor:
    """[T, Hq, D] against [Hkv, S, D]; without a mask a single token, or T = S, which is plainly causal."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[0]
    if options.softcap is not None:
        return _attend_capped(q, k, v, mask, options.softcap, options.scale)
    if tokens == 1:
        # The query heads of a group see the same keys: as rows of one small product they read them once.
        grouped = q.view(1, kv_heads, heads // kv_heads, head_dim)
        return F.scaled_dot_product_attention(grouped, k[None], v[None], scale=options.scale).view(1, heads, head_dim)
    queries = q.transpose(0, 1)[None]
    attended = F.scaled_dot_product_attention(
        queries,
        k[None],
        v[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=options.scale,
        enable_gqa=heads != kv_heads,
    )
    return attended[0].transpose(0, 1)


def _attend_capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, softcap: float, scale: float | None
) -> torch.Tensor:
    """As `_attend`, with capped scores; without a mask every token sees every key."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[0]
    # The query heads of a group and their tokens are the rows of one product with the keys that they share.
    rows = q.view(tokens, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    scores = torch.bmm(rows, k.transpose(1, 2)).float()
    scores = scores.mul_((scale if scale is not None else head_dim**-0.5) / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores.view(kv_heads, -1, *mask.shape).add_(mask)
    attended = torch.bmm(torch.softmax(scores, dim=-1).to(v.dtype), v)
    return attended.view(kv_heads, -1, tokens, head_dim).permute(2, 0, 1, 3).reshape(tokens, heads, head_dim)


def _runs(pages: npt.NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """[first, last) index ranges in which the page numbers are adjacent."""
    if len(pages) == 0:
        return
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    bounds = [0, *breaks.tolist(), len(pages)]
    yield from pairwise(bounds)
