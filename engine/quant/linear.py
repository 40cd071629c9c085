"""Linear layers that own their weights in one or more layouts and pick by the number of rows.

Few rows: the time goes into reading weights, so the packed layout wins. Many rows: into products, so the dense one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.quant import int4

PACKED_ROWS = 16
"""Up to this many rows the packed product is faster than the dense one (AVX2 and AVX-512, 2 cores)."""


class Linear(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, K] to [rows, N]."""
        ...


class DenseLinear:
    """One dense weight [N, K]; x is cast to its dtype and the result to x's."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self._weight.dtype), self._weight, self._bias).to(x.dtype)


class Int4Linear:
    """Packed 4-bit weights for few rows, the same weights dense for many."""

    def __init__(
        self, packed: torch.Tensor, scale_zero: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        self._packed = packed
        self._scale_zero = scale_zero
        self._dense = DenseLinear(dense, bias)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > PACKED_ROWS:
            return self._dense(x)
        y = torch._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), self._packed, int4.GROUP, self._scale_zero).to(
            x.dtype
        )
        return y if self._bias is None else y + self._bias.to(x.dtype)


class Int8Linear:
    """8-bit weights [N, K] with one bfloat16 scale a row: for lm_head, whose rows are always few. K % 16 must be 0."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        if weight.shape[1] % 16:
            raise ValueError("the 8-bit product needs an input size that is a multiple of 16")
        self._weight = weight
        self._scale = scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch._weight_int8pack_mm(x.to(torch.bfloat16), self._weight, self._scale).to(x.dtype)


def quantize_rows_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] float32 to int8 and one bfloat16 scale a row, symmetric."""
    scale = (weight.abs().amax(-1) / 127.0).clamp_min(1e-8).to(torch.bfloat16)
    q = (weight / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return q, scale


def load_linear(tensors: Mapping[str, torch.Tensor], name: str) -> Linear:
    """The layer `name` of a converted model, by the layouts that are there."""
    bias = tensors.get(f"{name}.bias")
    if f"{name}.int4" in tensors:
        return Int4Linear(tensors[f"{name}.int4"], tensors[f"{name}.scale_zero"], tensors[f"{name}.weight"], bias)
    if f"{name}.int8" in tensors:
        return Int8Linear(tensors[f"{name}.int8"], tensors[f"{name}.scale"])
    return DenseLinear(tensors[f"{name}.weight"], bias)
