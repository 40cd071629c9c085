"""The small operations between a decoder's products: in plain torch, and as FlashInfer's fused kernels."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.nn.functional as F

EPSILON = 1e-5
THETA = 1e6


class Operations(Protocol):
    """x, total: [T, hidden]; q: [T, Hq, D]; k: [T, Hkv, D]; positions: [T] int32."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...

    def add_norm(self, x: torch.Tensor, total: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """total + x, and its norm. May write over both."""
        ...

    def rotate(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary embedding of adjacent pairs (RoFormer, arXiv 2104.09864)."""
        ...

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half."""
        ...


class Plain:
    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, EPSILON)

    def add_norm(self, x: torch.Tensor, total: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = total + x
        return total, self.norm(total, weight)

    def rotate(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = q.shape[-1] // 2
        rates = THETA ** (-torch.arange(half, device=q.device, dtype=torch.float32) / half)
        angles = positions[:, None, None] * rates
        turns = torch.polar(torch.ones_like(angles), angles)
        return _turned(q, turns), _turned(k, turns)

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return F.silu(first) * second


class Fused:
    """Needs CUDA and a compiled FlashInfer."""

    def __init__(self) -> None:
        self._flashinfer: Any = import_module("flashinfer")

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self._flashinfer.rmsnorm(x, weight, EPSILON)
        return normed

    def add_norm(self, x: torch.Tensor, total: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._flashinfer.fused_add_rmsnorm(x, total, weight, EPSILON)
        return total, x

    def rotate(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rotated: tuple[torch.Tensor, torch.Tensor] = self._flashinfer.apply_rope_pos_ids(
            q, k, positions, interleave=True, rope_theta=THETA
        )
        return rotated

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = self._flashinfer.silu_and_mul(x)
        return gated


@dataclass(frozen=True, slots=True)
class Mixed:
    """Each from where it is to be had."""

    norms: Operations
    rotations: Operations
    gates: Operations

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.norms.norm(x, weight)

    def add_norm(self, x: torch.Tensor, total: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norms.add_norm(x, total, weight)

    def rotate(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rotations.rotate(q, k, positions)

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        return self.gates.gate(x)


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
