"""4-bit weights in groups of 32 along the input: w = (q - 8) * scale + zero, q in 0..15."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP = 32


@dataclass(frozen=True, slots=True)
class Grouped4Bit:
    """q: [N, K] int32 in 0..15; scale and zero: [N, K / GROUP] float32."""

    q: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """[N, K] float32."""
        rows, columns = self.q.shape
        grouped = (self.q.view(rows, -1, GROUP).float() - 8.0) * self.scale[..., None] + self.zero[..., None]
        return grouped.view(rows, columns)


def fits(rows: int, columns: int) -> bool:
    """Whether torch's packed product takes a weight of this shape."""
    return rows % 16 == 0 and columns % GROUP == 0


def quantize(weight: torch.Tensor) -> Grouped4Bit:
    """Rounds [N, K] float32 to the nearest of 16 steps between the extremes of each group."""
    rows, columns = weight.shape
    grouped = weight.float().view(rows, columns // GROUP, GROUP)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = ((high - low) / 15.0).clamp_min(1e-8)
    q = ((grouped - low[..., None]) / scale[..., None]).round_().clamp_(0, 15).to(torch.int32)
    return Grouped4Bit(q.view(rows, columns), scale, low + 8.0 * scale)


def pack(weight: Grouped4Bit) -> tuple[torch.Tensor, torch.Tensor]:
    """What `_weight_int4pack_mm_for_cpu` reads: packed nibbles [N, K / 2] uint8 and [K / GROUP, N, 2] bfloat16.

    The order of the nibbles depends on the vector width of this processor, so packed weights do not travel.
    """
    packed = torch._convert_weight_to_int4pack_for_cpu(weight.q.contiguous(), 2)
    scale_zero = torch.stack((weight.scale.t(), weight.zero.t()), dim=-1).to(torch.bfloat16).contiguous()
    return packed, scale_zero
