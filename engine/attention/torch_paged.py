"""Attention over pages in plain torch, for any device: the fallback where FlashInfer cannot serve, and what the other
backends over pages are compared with.

In every layer each row's keys and values are gathered through its page table, which costs more than attending to them:
on a CPU, cpu.py is far quicker. Then the rows are attended to one by one, or all at once where torch can (varlen.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cache import TailCopy
from engine.attention.base import AttentionRow, LayerAttention, layers_of, scale_of
from engine.attention.paged_kv import PagedKV
from engine.attention.step_tables import Lengths, StepTables
from engine.attention.transfers import Staging, transfers_for
from engine.attention.varlen import Varlen, find_varlen


@dataclass(frozen=True, slots=True)
class _Span:
    """One row: its flat tokens, and its keys among all that are gathered."""

    tokens: slice
    keys: slice
    start: int


@dataclass(frozen=True, slots=True)
class _Step:
    token_slots: torch.Tensor
    key_slots: torch.Tensor
    spans: tuple[_Span, ...]
    lengths: Lengths


class TorchPagedAttention:
    """An AttentionBackend. Queries, keys and values are attended to in the `attend_dtype` of `kv`."""

    def __init__(
        self, kv: PagedKV, layers: Sequence[LayerAttention] | None = None, varlen: Varlen | None = None
    ) -> None:
        """layers: one for each layer of the shape; None: all of them plain. varlen: for the `attend_dtype` of `kv`."""
        self._kv = kv
        self._varlen = varlen
        self._layers = layers_of(kv.shape, layers)
        self._staging = Staging(transfers_for(kv.device), kv.device)
        self._step: _Step | None = None

    @classmethod
    def quickest(cls, kv: PagedKV, layers: Sequence[LayerAttention] | None) -> TorchPagedAttention:
        """To all rows at once, where torch can on the device of `kv`."""
        return cls(kv, layers, find_varlen(kv.device, kv.attend_dtype, kv.shape.head_dim))

    def plan(self, rows: Sequence[AttentionRow]) -> None:
        """See AttentionBackend. Raises ValueError for rows without tokens or with too few pages."""
        self._step = None
        size = self._kv.shape.page_size
        tables = StepTables.build(rows, size)
        slots = (tables.token_slots(size), tables.key_slots(size))
        with self._staging.step((*slots, tables.fresh, tables.token_offsets, tables.key_offsets)) as staged:
            token_slots, key_slots, fresh, token_offsets, key_offsets = (array.device for array in staged)
            self._kv.clear(fresh)
            self._step = _Step(token_slots, key_slots, _spans(rows), tables.lengths(token_offsets, key_offsets))

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._step is None:
            raise RuntimeError("a layer was run before its step was planned")
        self._kv.write(layer, self._step.token_slots, k, v)
        keys, values = self._kv.gather(layer, self._step.key_slots)
        options, scale = self._layers[layer], scale_of(self._layers[layer], self._kv.shape.head_dim)
        if self._varlen is not None and options.softcap is None:
            return self._varlen(q.to(keys.dtype), keys, values, self._step.lengths, scale, options)
        attended = torch.empty_like(q, dtype=keys.dtype, memory_format=torch.contiguous_format)
        for span in self._step.spans:
            row = q[span.tokens].to(keys.dtype)
            attended[span.tokens] = _attend(row, keys[span.keys], values[span.keys], span.start, options, scale)
        return attended

    def fork(self, source: int, target: int, tokens: int, tail: TailCopy | None) -> None:
        if tail is not None:
            self._kv.copy_tail(tail)

    def drop(self, sequence: int) -> None:
        """Does nothing: a sequence is its pages."""


def _spans(rows: Sequence[AttentionRow]) -> tuple[_Span, ...]:
    spans, token, key = [], 0, 0
    for row in rows:
        end = row.start + row.count
        spans.append(_Span(slice(token, token + row.count), slice(key, key + end), row.start))
        token, key = token + row.count, key + end
    return tuple(spans)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, options: LayerAttention, scale: float
) -> torch.Tensor:
    """q [T, Hq, D], the tokens from `start` on, against k and v [start + T, Hkv, D]; gives [T, Hq, D]."""
    visible = _visible(len(q), start, options.window, q.device)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if options.softcap is None:
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
    else:
        attended = _softcapped(q, k, v, visible, scale, options.softcap)
    return attended[0].transpose(0, 1)


def _softcapped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, scale: float, softcap: float
) -> torch.Tensor:
    """q [1, Hq, T, D], k and v [1, Hkv, S, D]; scores are in float32."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.matmul(q, k.transpose(2, 3)).float().mul_(scale / softcap).tanh_().mul_(softcap)
    if visible is not None:
        scores.masked_fill_(~visible, float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1).to(v.dtype), v)


def _visible(count: int, start: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """[count, start + count] bool: which keys each token sees. None: all of them."""
    if count == 1 and (window is None or window > start):
        return None
    own = torch.arange(start, start + count, device=device)[:, None]
    theirs = torch.arange(start + count, device=device)
    seen = theirs <= own
    if window is not None:
        seen &= theirs > own - window
    return seen
