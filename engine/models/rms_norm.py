"""Root mean square normalization (arXiv 1910.07467) in a third of the operations of torch's own for the CPU."""

from __future__ import annotations

import torch

from engine.kernels import Norm


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, [size]; computed in float32, given in x's dtype.

    mean(x^2) + eps  =  (|x|^2 + size * eps) / size
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        size = len(weight)
        self.norm = Norm(weight.float().contiguous(), eps)
        self._weight = weight.float() * size**0.5
        self._floor = torch.tensor((size * eps) ** 0.5)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).hypot_(self._floor)
        normed: torch.Tensor = (x / length).mul_(self._weight)
        return normed.to(x.dtype)
