"""Weights of 8 bits with one scale for each output: w = scale * q, q whole numbers or 8-bit floats.

This is how CUDA's products want them (linear.py); for the CPU there are groups (engine/quant/grouped.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""What the largest element of a row becomes, by type. -128 is left out, so that rounding is symmetric."""

LEAST_SCALE = 2.0**-100
"""Of a row of zeros, which would otherwise be divided by zero."""

_MULTIPLE = 16
"""Of inputs and of outputs, as torch.nn.functional.scaled_mm wants in CUDA. torch._int_mm is content with 8."""


@dataclass(frozen=True, slots=True)
class RowScaled:
    """q: [N, K] int8 or float8_e4m3fn. scale: [N] float32, above zero."""

    q: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def fits(outputs: int, inputs: int) -> bool:
        """Whether CUDA multiplies such weights."""
        return outputs % _MULTIPLE == 0 and inputs % _MULTIPLE == 0 and min(outputs, inputs) > 0

    @classmethod
    def of(cls, weight: torch.Tensor, dtype: torch.dtype) -> RowScaled:
        """Rounds [N, K] to the nearest that there is in this type. Raises ValueError where a weight is not finite."""
        weight = weight.float()
        scale = (weight.abs().amax(-1, keepdim=True) / LARGEST[dtype]).clamp_min_(LEAST_SCALE)
        if not bool(scale.isfinite().all()):
            raise ValueError("a weight is not finite")
        scaled = weight / scale
        return cls((scaled.round_() if dtype == torch.int8 else scaled).to(dtype), scale[:, 0])

    def dequantize(self) -> torch.Tensor:
        """[N, K] float32."""
        return self.q.float() * self.scale[:, None]
