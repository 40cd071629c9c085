"""An adapter as the decoder's fused linear layers want it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Part:
    """One projection's share of a fused layer: up [r, n] is LoRA's B, scaled and transposed.

    It reads `ranks` of the R intermediate values and adds to `columns` of the N outputs.
    """

    ranks: slice
    columns: slice
    up: torch.Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """The update of a linear layer with K inputs and N outputs. down: [R, K], the A of all parts, one below another.

    One product down serves all parts; each goes up by its own, since a block matrix would be mostly zeros to read.
    """

    down: torch.Tensor
    parts: tuple[Part, ...]

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Adds the update of the inputs x [rows, K] to the outputs y [rows, N] in place."""
        h = F.linear(x.to(self.down.dtype), self.down)
        for part in self.parts:
            y[:, part.columns].addmm_(h[:, part.ranks], part.up)

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> LowRank:
        parts = tuple(replace(part, up=part.up.to(device, dtype)) for part in self.parts)
        return LowRank(self.down.to(device, dtype), parts)


@dataclass(frozen=True, slots=True)
class Adapter:
    """updates: by the decoder's names of its linear layers, such as layers.0.qkv; the others are left as they are."""

    name: str
    updates: Mapping[str, LowRank]
