"""An adapter as the decoder's fused linear layers want it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to the weight [N, K] of a linear layer: up.T @ down, with down [R, K] and up [R, N].

    down is LoRA's A; up is its B, scaled, and transposed because products with few rows read it faster that way.
    """

    down: torch.Tensor
    up: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """What is added to the layer's output: [rows, K] to [rows, N]."""
        return F.linear(x, self.down) @ self.up

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """The same, added to y [rows, N] in place."""
        y.addmm_(F.linear(x, self.down), self.up)

    def to(self, dtype: torch.dtype) -> LowRank:
        return LowRank(self.down.to(dtype), self.up.to(dtype))


@dataclass(frozen=True, slots=True)
class Adapter:
    """updates: by the decoder's names of its linear layers, such as layers.0.qkv; the others are left as they are."""

    name: str
    updates: Mapping[str, LowRank]
