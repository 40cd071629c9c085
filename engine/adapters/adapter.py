"""An adapter as the decoder's fused linear layers want it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to the weight [N, K] of a linear layer: b @ a, with a [R, K] and b [N, R], scale included."""

    a: torch.Tensor
    b: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """What is added to the layer's output: [rows, K] to [rows, N]."""
        return F.linear(F.linear(x, self.a), self.b)

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """The same, added to y [rows, N] in place."""
        y.addmm_(F.linear(x, self.a), self.b.t())

    def to(self, dtype: torch.dtype) -> LowRank:
        return LowRank(self.a.to(dtype), self.b.to(dtype))


@dataclass(frozen=True, slots=True)
class Adapter:
    """updates: by the decoder's names of its linear layers, such as layers.0.qkv; the others are left as they are."""

    name: str
    updates: Mapping[str, LowRank]
