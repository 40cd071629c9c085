"""Prefill on CUDA by flash-attn's varlen kernels, over the same pages as the other backends.

When it is used: only if asked for by name, where flash-attn is installed and FlashInfer's kernels for prompts are not
wanted. A step in which some row computes more than one token is attended to here; steps of single tokens go to the
backend for decoding that it is given (FlashInfer's, or torch's), which shares the pages.

    page_size a multiple of 256    kernels read pages through a block table
    any other                      keys and values of the step's rows are gathered first, in every layer

Source: FlashAttention-2 (arXiv 2307.08691); the function as in flash-attn 2.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from cache import TailCopy
from engine.attention.base import AttentionBackend, AttentionRow, LayerAttention, layers_of, scale_of
from engine.attention.paged_kv import PagedKV
from engine.attention.step_tables import Lengths, StepTables
from engine.attention.transfers import Staging, transfers_for
from engine.errors import AttentionUnavailable

DTYPES = (torch.float16, torch.bfloat16)
LARGEST_HEAD_DIM = 256

_PAGE_MULTIPLE = 256


def unsupported(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why flash-attn cannot serve such keys and values; None: it can."""
    if head_dim > LARGEST_HEAD_DIM or head_dim % 8 != 0:
        return f"flash-attn takes heads of up to {LARGEST_HEAD_DIM} elements, in multiples of 8, not {head_dim}"
    if dtype not in DTYPES:
        return f"flash-attn has no kernels for {dtype}, only for {', '.join(map(str, DTYPES))}"
    return None


def reads_pages(page_size: int) -> bool:
    """Whether its kernels read pages of that size, so that nothing has to be gathered."""
    return page_size % _PAGE_MULTIPLE == 0


@dataclass(frozen=True, slots=True)
class _Step:
    """keys: a block table [R, M], or the slots [sum of keys] to gather."""

    token_slots: torch.Tensor
    lengths: Lengths
    keys: torch.Tensor


class FlashAttnAttention:
    """An AttentionBackend. decode: another one over the same `kv`, for steps of single tokens."""

    def __init__(self, kv: PagedKV, layers: Sequence[LayerAttention] | None, decode: AttentionBackend) -> None:
        """layers: one for each layer of the shape; None: all of them plain.

        Raises AttentionUnavailable where flash-attn is not installed or lacks the kernels.
        """
        if (reason := unsupported(kv.shape.head_dim, kv.shape.dtype)) is not None:
            raise AttentionUnavailable(reason)
        self._varlen = _load()
        self._kv = kv
        self._layers = layers_of(kv.shape, layers)
        self._decode = decode
        self._paged = reads_pages(kv.shape.page_size)
        self._staging = Staging(transfers_for(kv.device), kv.device)
        self._step: _Step | None = None  # None: the step is one of single tokens

    def plan(self, rows: Sequence[AttentionRow]) -> None:
        """See AttentionBackend. Raises ValueError for rows without tokens or with too few pages."""
        self._step = None
        if all(row.count == 1 for row in rows):
            self._decode.plan(rows)
            return
        size = self._kv.shape.page_size
        tables = StepTables.build(rows, size)
        keys = tables.block_table() if self._paged else tables.key_slots(size)
        arrays = (tables.token_slots(size), tables.token_offsets, tables.key_offsets, keys, tables.fresh)
        with self._staging.step(arrays) as staged:
            token_slots, token_offsets, key_offsets, on_device, fresh = (array.device for array in staged)
            self._kv.clear(fresh)
        if self._paged:
            on_device = on_device.view(len(rows), -1)
        self._step = _Step(token_slots, tables.lengths(token_offsets, key_offsets), on_device)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if (step := self._step) is None:
            return self._decode.run(layer, q, k, v)
        self._kv.write(layer, step.token_slots, k, v)
        keys, values = self._keys(layer, step)
        options = self._layers[layer]
        attended: torch.Tensor = self._varlen(
            q.to(keys.dtype),
            keys,
            values,
            step.lengths.token_offsets,
            step.lengths.key_offsets,
            step.lengths.most_tokens,
            step.lengths.most_keys,
            softmax_scale=scale_of(options, self._kv.shape.head_dim),
            causal=True,
            window_size=(options.window_left, -1),
            softcap=options.softcap if options.softcap is not None else 0.0,
            block_table=step.keys if self._paged else None,
        )
        return attended

    def fork(self, source: int, target: int, tokens: int, tail: TailCopy | None) -> None:
        self._decode.fork(source, target, tokens, tail)

    def drop(self, sequence: int) -> None:
        self._decode.drop(sequence)

    def _keys(self, layer: int, step: _Step) -> tuple[torch.Tensor, torch.Tensor]:
        """All pages, [pages, page_size, Hkv, D] twice, or the rows' own keys and values, [sum of keys, Hkv, D]."""
        if self._paged:
            kv = self._kv.layer(layer)
            return kv[:, 0], kv[:, 1]
        return self._kv.gather(layer, step.keys)


def _load() -> Any:
    try:
        return import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, AttributeError) as error:
        raise AttentionUnavailable(f"flash-attn cannot be loaded: {error}") from error
