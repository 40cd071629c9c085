"""Weights of 4 or 8 bits in groups of 32 along the input: w = scale * u + least.

GGUF's Q4_1 and Q4_0 are of this kind, and kept exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from engine.kernels.products import BLOCK, GROUP

Bits = Literal[4, 8]
_SMALLEST_SCALE = 2.0**-24
"""Of float16, in which scales are packed."""


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """u: [N, K] uint8, below 2 ** bits. scale and least: [N, K / GROUP] float16. K is a multiple of GROUP."""

    bits: Bits
    u: torch.Tensor
    scale: torch.Tensor
    least: torch.Tensor

    @staticmethod
    def fits(columns: int) -> bool:
        """Whether weights with so many inputs can be grouped."""
        return columns % GROUP == 0

    @classmethod
    def of(cls, weight: torch.Tensor, bits: Bits) -> GroupedWeight:
        """Rounds [N, K] to the nearest of 2 ** bits steps between the extremes of each group.

        Raises ValueError where a weight is not finite, or too large for float16.
        """
        rows, columns = weight.shape
        grouped = weight.float().view(rows, columns // GROUP, GROUP)
        low, high = grouped.amin(-1), grouped.amax(-1)
        scale = ((high - low) / (2**bits - 1)).clamp_min(_SMALLEST_SCALE).half()
        least = low.half()
        if not bool(scale.isfinite().all() & least.isfinite().all()):
            raise ValueError("a weight is not finite in 16 bits")
        u = ((grouped - least.float()[..., None]) / scale.float()[..., None]).round_().clamp_(0, 2**bits - 1)
        return cls(bits, u.to(torch.uint8).view(rows, columns), scale, least)

    @classmethod
    def cat(cls, parts: list[GroupedWeight]) -> GroupedWeight:
        """The outputs of several weights of the same inputs and bits, one after the other."""
        columns = (torch.cat([getattr(part, name) for part in parts]) for name in ("u", "scale", "least"))
        return cls(parts[0].bits, *columns)

    def dequantize(self) -> torch.Tensor:
        """[N, K] float32."""
        rows, columns = self.u.shape
        grouped = self.u.view(rows, -1, GROUP).float() * self.scale.float()[..., None] + self.least.float()[..., None]
        return grouped.view(rows, columns)

    def pack(self) -> torch.Tensor:
        """[ceil(N / 16), K / 32, bytes] uint8, as engine/kernels/products.py reads it; outputs behind N are zero."""
        rows, columns = self.u.shape
        groups, blocks = columns // GROUP, -(-rows // BLOCK)
        padded = F.pad(self.u, (0, 0, 0, blocks * BLOCK - rows))
        quads = padded.view(blocks, BLOCK, groups, 8, 4).permute(0, 2, 3, 1, 4)
        if self.bits == 4:
            quads = quads[:, :, :4] | (quads[:, :, 4:] << 4)
        parts = [quads.reshape(blocks, groups, -1)]
        for each in (self.scale, self.least):
            filled = F.pad(each, (0, 0, 0, blocks * BLOCK - rows)).view(blocks, BLOCK, groups)
            parts.append(filled.transpose(1, 2).contiguous().view(torch.uint8))
        return torch.cat(parts, dim=-1)
