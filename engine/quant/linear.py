"""Linear layers that own their weights in one or more layouts and pick by the number of rows.

Few rows: the time goes into reading weights, so the packed layout wins. Many rows: into products, so the dense one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.quant import int4
from engine.quant.int8 import Int8Linear

MOST_PACKED_ROWS = 16


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
    """Packed 4-bit weights for few rows, the same weights dense for many."""

    def __init__(
        self, packed: torch.Tensor, scale_zero: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        self._packed = packed
        self._scale_zero = scale_zero
        self._dense = DenseLinear(dense, bias)
        # Up to where the packed product is the faster one, on 2 cores: with AVX2 to 16 rows, but where bfloat16 is
        # multiplied natively (AVX-512, AMX) to 10.
        self._few = 10 if dense.dtype == torch.bfloat16 else MOST_PACKED_ROWS
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self._few:
            return self._dense(x)
        y = torch._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), self._packed, int4.GROUP, self._scale_zero)
        return y if self._bias is None else y.add_(self._bias)


def load_linear(tensors: Mapping[str, torch.Tensor], name: str) -> Linear:
    """The layer `name` of a converted model, by the layouts that are there."""
    bias = tensors.get(f"{name}.bias")
    if f"{name}.int4" in tensors:
        return Int4Linear(tensors[f"{name}.int4"], tensors[f"{name}.scale_zero"], tensors[f"{name}.weight"], bias)
    if f"{name}.int8" in tensors:
        return Int8Linear(tensors[f"{name}.int8"], tensors[f"{name}.scale"], bias)
    return DenseLinear(tensors[f"{name}.weight"], bias)
