"""Linear layers that own their weights in one or more layouts and pick by the number of rows.

Few rows: the time goes into reading weights, so the packed layout wins. Many rows: into products, so 8 bits win where
the processor multiplies those natively (VNNI), and dense weights elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.quant import int4
from engine.quant.int8 import Int8Linear, SmoothedInt8Linear

# Up to how many rows the packed product is the faster one on 2 cores, at most and beside 8 bits (docs/performance.md).
MOST_PACKED_ROWS = 16
FEW_BESIDE_INT8 = 8


class Linear(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, K] in any float type to [rows, N] in the type of the layer's products."""
        ...


class DenseLinear:
    """One dense weight [N, K], in whose type it computes."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self._weight.dtype), self._weight, self._bias)


class Int4Linear:
    """Packed 4-bit weights for few rows, up to `few`; about the same weights in another layout for many."""

    def __init__(
        self,
        packed: torch.Tensor,
        scale_zero: torch.Tensor,
        many: Linear,
        few: int,
        bias: torch.Tensor | None = None,
    ) -> None:
        self._packed = packed
        self._scale_zero = scale_zero
        self._many = many
        self._few = few
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self._few:
            return self._many(x)
        y = torch._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), self._packed, int4.GROUP, self._scale_zero)
        return y if self._bias is None else y.float().add_(self._bias)


def few_beside_dense(dtype: torch.dtype) -> int:
    """With AVX2 all of MOST_PACKED_ROWS, but where bfloat16 is multiplied natively (AVX-512, AMX) 10."""
    return 10 if dtype == torch.bfloat16 else MOST_PACKED_ROWS


def load_linear(tensors: Mapping[str, torch.Tensor], name: str) -> Linear:
    """The layer `name` of a converted model, by the layouts that are there."""
    bias = tensors.get(f"{name}.bias")
    if f"{name}.int4" not in tensors:
        return _load_many(tensors, name, bias)
    dense = tensors.get(f"{name}.weight")
    few = FEW_BESIDE_INT8 if dense is None else few_beside_dense(dense.dtype)
    many = _load_many(tensors, name, bias)
    return Int4Linear(tensors[f"{name}.int4"], tensors[f"{name}.scale_zero"], many, few, bias)


def _load_many(tensors: Mapping[str, torch.Tensor], name: str, bias: torch.Tensor | None) -> Linear:
    if f"{name}.int8" not in tensors:
        return DenseLinear(tensors[f"{name}.weight"], bias)
    weight, scale = tensors[f"{name}.int8"], tensors[f"{name}.scale"]
    if (smoothing := tensors.get(f"{name}.smoothing")) is None:
        return Int8Linear(weight, scale, bias)
    return SmoothedInt8Linear(weight, scale, smoothing, bias)
