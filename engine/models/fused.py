"""FlashInfer's kernels for what a decoder computes between its products, each in one launch.

They compute in float32 and round once, to the type of what they are given. Where that is not what the others compute
they are not used:

    norm     in the type of the activations, so only where the weight is the same in it
    heads    only with head sizes that there are kernels for; pairs are adjacent (is_neox=False)
    gate     rows of a multiple of 16 bytes

Signatures and limits as in flashinfer-python 0.6.13 and 0.7.4.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from engine.attention import flashinfer
from engine.errors import AttentionUnavailable
from engine.kernels import Heads, Norm
from engine.models.elementwise import RowNorm, SplitHeads, TorchElementwise

_ALIGNMENT = 16  # bytes


class FlashInferElementwise:
    """Implements `Elementwise` for activations of one type; what FlashInfer cannot do exactly, torch does."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Raises AttentionUnavailable where FlashInfer is not installed."""
        try:
            self._kernels = import_module("flashinfer")
        except ImportError as error:
            raise AttentionUnavailable(f"FlashInfer cannot be loaded: {error}") from error
        self._dtype = dtype
        self._torch = TorchElementwise()

    def norm(self, weight: torch.Tensor, eps: float) -> RowNorm:
        narrow = weight.to(self._dtype)
        if self._dtype not in flashinfer.DTYPES or not torch.equal(narrow.float(), weight.float()):
            return self._torch.norm(weight, eps)
        return _FusedNorm(self._kernels, Norm(weight.float(), eps), narrow)

    def heads(self, heads: Heads) -> SplitHeads:
        if (
            self._dtype not in flashinfer.DTYPES
            or heads.table is None
            or 2 * heads.table.shape[1] not in flashinfer.HEAD_DIMS
        ):
            return self._torch.heads(heads)
        norms = [None if norm is None else self.norm(*norm) for norm in (heads.query_norm, heads.key_norm)]
        return _FusedHeads(self._kernels, heads, norms)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        size = gate_up.shape[-1] // 2 * gate_up.dtype.itemsize
        if gate_up.dtype not in flashinfer.DTYPES or size % _ALIGNMENT or len(gate_up) == 0:
            return self._torch.gate(gate_up)
        gated: torch.Tensor = self._kernels.silu_and_mul(gate_up.contiguous())
        return gated


class _FusedNorm:
    """weight: in the type of the activations."""

    def __init__(self, kernels: Any, norm: Norm, weight: torch.Tensor) -> None:
        self.norm = norm
        self._kernels = kernels
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0:
            return x
        normed: torch.Tensor = self._kernels.rmsnorm(x, self._weight, self.norm.eps)
        return normed


class _FusedHeads:
    """norms: of queries and keys. The table of cosines and sines is as the kernel reads it: all of the one first."""

    def __init__(self, kernels: Any, heads: Heads, norms: list[RowNorm | None]) -> None:
        assert heads.table is not None
        self._kernels = kernels
        self._heads = heads
        self._norms = norms
        self._size = 2 * heads.table.shape[1]
        self._table = heads.table.transpose(1, 2).flatten(1).contiguous()

    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        queries, keys = self._heads.queries, self._heads.keys
        heads = qkv.view(len(qkv), queries + 2 * keys, self._size)
        q, k, v = torch.split(heads, [queries, keys, keys], dim=1)
        q, k = (x if norm is None else norm(x) for x, norm in zip((q, k), self._norms, strict=True))
        self._kernels.apply_rope_with_cos_sin_cache_inplace(
            positions, q.flatten(1), k.flatten(1), self._size, self._table, is_neox=False
        )
        return q, k, v
