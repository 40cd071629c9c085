"""Linear layers: dense ones are torch's, packed ones are multiplied by our own machine code, narrow ones by a card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.kernels import Norm, Products
from engine.narrow import RowScaled, narrow_linear


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


class PackedLinear:
    """One packed weight, see `GroupedWeight.pack`, of so many outputs; activations of 8 bits, results in float32.

    What a decoder does before and after a product can be done along with it. packed and bias are as `Products` wants
    them. whole: no output is there only to fill the last block of the weight.
    """

    def __init__(
        self, products: Products, packed: torch.Tensor, outputs: int, bias: torch.Tensor | None = None
    ) -> None:
        filled = packed.shape[0] * 16
        self.packed = packed
        self.bias = None if bias is None else F.pad(bias.float(), (0, filled - outputs))
        self.whole = outputs == filled
        self._products = products
        self._outputs = outputs

    def __call__(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        add_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Products.product`. x in any float type; add_to: float32 [rows, N]."""
        x = x.float().contiguous()
        joined = add_to if self.whole else None
        y = self._products.product(x, self.packed, self.bias, norm=norm, gated=gated, add_to=joined)
        if self.whole:
            return y
        return y[:, : self._outputs] if add_to is None else add_to.add_(y[:, : self._outputs])


def load_linear(tensors: Mapping[str, torch.Tensor], name: str, products: Products) -> Linear:
    """The layer `name` of a converted model, by what is there of it."""
    bias = tensors.get(f"{name}.bias")
    if (packed := tensors.get(f"{name}.packed")) is not None:
        return PackedLinear(products, packed, int(tensors[f"{name}.outputs"]), bias)
    weight = tensors[f"{name}.weight"]
    if (scale := tensors.get(f"{name}.scale")) is not None:
        return narrow_linear(RowScaled(weight, scale), bias)
    return DenseLinear(weight, bias)
