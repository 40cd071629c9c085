"""Paged attention in plain batched products, for the CPU.

torch's scaled_dot_product_attention takes two to three times as long for the tokens of many sequences, and almost twice
as long for a chunk of a prompt; it is quicker for one token behind a short past alone, and used there.

Each running sequence has a working copy of its keys and values (engine/attention/working.py): filled once from the pool
when the sequence arrives, appended to by every step. Only pages that a step has completed are written back to the pool,
all layers in one go: a page that is not full is never shared, so nobody else needs it there. A page that was completed
by guesses which were not kept is completed, and written, once more before it can be shared. A sequence whose page table
is empty lives in its working copy alone. How the pool stores pages is its own affair (engine/attention/kv_pool.py); a
working copy holds what the pool would give back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import isfinite

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from cache import TailCopy
from engine.attention.base import AttentionRow, KVShape, LayerAttention
from engine.attention.groups import Group, group_rows
from engine.attention.kv_pool import make_pool
from engine.attention.working import WorkingCopies, WorkingCopy


class TorchAttention:
    """The AttentionBackend for CPUs. Holds the pool: num_pages * page_bytes bytes, touched as it fills.

    layers: one for each layer of the shape; None: all of them plain.
    """

    def __init__(self, shape: KVShape, layers: Sequence[LayerAttention] | None = None) -> None:
        self._shape = shape
        self._layers = tuple(layers) if layers is not None else (LayerAttention(),) * shape.num_layers
        if len(self._layers) != shape.num_layers:
            raise ValueError(f"{shape.num_layers} layers, but the attention of {len(self._layers)}")
        self._windows = tuple(dict.fromkeys(layer.window for layer in self._layers))
        self._mask_of = tuple(self._windows.index(layer.window) for layer in self._layers)
        self._pool = make_pool(shape)
        self._working = WorkingCopies(shape, self._pool.dtype)
        self._rows: list[tuple[AttentionRow, WorkingCopy, bool]] = []  # the last: was tainted before the step
        self._groups: list[Group] = []

    @property
    def sequences(self) -> int:
        """How many have a working copy."""
        return len(self._working)

    def plan(self, rows: Sequence[AttentionRow]) -> None:
        for row in rows:
            self._prepare(row)
        copies = [self._working[row.sequence] for row in rows]
        self._rows = [(row, copy, copy.tainted) for row, copy in zip(rows, copies, strict=True)]
        for copy in copies:
            copy.tainted = True  # until the step has got to its end
        self._groups = group_rows(rows, copies, self._windows)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        options, stored = self._layers[layer], self._pool.rounded(k, v)
        scale = options.scale if options.scale is not None else self._shape.head_dim**-0.5
        queries, attended = (q * scale).to(self._pool.dtype), None
        for group in self._groups:
            room = group.room.kv[layer]
            kept = stored if group.alone else stored[:, group.own]
            room.view(-1, room.shape[-1]).index_copy_(0, group.stored.view(-1), kept.reshape(-1, room.shape[-1]))
            rows = self._attend(group, queries[group.tokens], layer)
            if group.kept is not None:
                rows = rows[group.kept]
            if group.alone:
                attended = rows
            else:
                attended = torch.empty_like(queries) if attended is None else attended
                attended[group.own] = rows
        if layer == self._shape.num_layers - 1:
            self._finish(stored)
        return queries if attended is None else attended

    def fork(self, source: int, target: int, tokens: int, tail: TailCopy | None) -> None:
        """Copies the working copy alone: a page that is not full is in no pool, so `tail` moves nothing there."""
        self._working.fork(source, target, tokens)

    @torch.inference_mode()
    def drop(self, sequence: int) -> None:
        self._working.drop(sequence)

    def _attend(self, group: Group, q: torch.Tensor, layer: int) -> torch.Tensor:
        """q [places * count, Hq, D], scaled; gives the same shape."""
        options = self._layers[layer]
        k, v = group.room.kv[layer, :, group.first : group.last]
        if group.single and options.softcap is None and (options.window is None or options.window >= group.end):
            return _attend_alone(q, k[0, :, : group.end], v[0, :, : group.end])
        mask = group.masks[self._mask_of[layer]]
        return _attend(q, k[:, :, : group.keys], v[:, :, : group.keys], mask, options.softcap)

    def _prepare(self, row: AttentionRow) -> None:
        """A working copy with room for what the row computes, which holds the row's past."""
        end = row.start + row.count
        if row.sequence in self._working:
            copy = self._working.reserve(row.sequence, end)
        else:
            copy = self._working.make(row.sequence, end)
            size = self._shape.page_size
            for first, last in _runs(row.pages[: -(-row.start // size)]):
                start, stop = first * size, min(last * size, row.start)
                self._pool.read(int(row.pages[first]) * size, copy.kv[..., start:stop, :])
        copy.length = max(copy.length, end)

    def _finish(self, stored: torch.Tensor) -> None:
        """After the last layer. What is not finite in any layer has spread to the keys and values of this one."""
        finite = isfinite(float(stored.sum()))
        for row, copy, tainted in self._rows:
            copy.tainted = tainted or not finite
            self._store_full_pages(row, copy)

    def _store_full_pages(self, row: AttentionRow, copy: WorkingCopy) -> None:
        size = self._shape.page_size
        full, before = (row.start + row.count) // size, row.start // size
        for first, last in _runs(row.pages[before:full]):
            start, end = (before + first) * size, (before + last) * size
            self._pool.write(int(row.pages[before + first]) * size, copy.kv[..., start:end, :])


def _attend_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One token's q [1, Hq, D], scaled, against [Hkv, keys, D]; gives [1, Hq, D].

    The query heads of a group see the same keys: as rows of one small product they read them once.
    """
    grouped = q.view(1, k.shape[0], -1, q.shape[-1])
    return F.scaled_dot_product_attention(grouped, k[None], v[None], scale=1.0).view(q.shape)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, softcap: float | None
) -> torch.Tensor:
    """q [places * count, Hq, D], scaled, against [places, Hkv, keys, D], mask [places, 1, count, keys]; gives the shape
    of q.

    The query heads that share a key head, and their tokens, are the rows of one product with its keys.
    """
    tokens, heads, head_dim = q.shape
    places, kv_heads, keys, _ = k.shape
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    by_head = q.view(places, -1, kv_heads, heads // kv_heads, head_dim).permute(0, 2, 3, 1, 4)
    scores = torch.bmm(by_head.reshape(places * kv_heads, -1, head_dim), k.transpose(1, 2))
    if softcap is not None:
        scores = scores.float().div_(softcap).tanh_().mul_(softcap)
    scores.view(places, heads, -1, keys).add_(mask)
    attended = torch.bmm(torch.softmax(scores, dim=-1).to(v.dtype), v)
    by_token = attended.view(places, heads, -1, head_dim).transpose(1, 2)
    return by_token.reshape(tokens, heads, head_dim)


def _runs(pages: npt.NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """[first, last) index ranges in which the page numbers are adjacent."""
    if len(pages) == 0:
        return
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    bounds = [0, *breaks.tolist(), len(pages)]
    yield from pairwise(bounds)
