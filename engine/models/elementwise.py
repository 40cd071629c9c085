"""What a decoder computes between its products: norms, positions, the gate. Each device has its own way."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from engine.kernels import Heads, Norm
from engine.models.rms_norm import RmsNorm


class RowNorm(Protocol):
    """RMSNorm (arXiv 1910.07467) by the weight and eps of `norm`."""

    @property
    def norm(self) -> Norm: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size], normed over the last dimension: computed in float32, given in x's dtype."""
        ...


class SplitHeads(Protocol):
    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [T, heads, size], the first two ready for attention, in a floating-point type.

        qkv: [T, all heads * size], which may be written over. positions: int64 [T].
        """
        ...


class Elementwise(Protocol):
    """The parts of one device. What they are made of lies on that device."""

    def norm(self, weight: torch.Tensor, eps: float) -> RowNorm:
        """weight: [size]."""
        ...

    def heads(self, heads: Heads) -> SplitHeads:
        """For as many values as `heads` has keys."""
        ...

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, [T, inner], of gate and up side by side."""
        ...


class CpuElementwise:
    """Machine code of our own."""

    def norm(self, weight: torch.Tensor, eps: float) -> RowNorm:
        return RmsNorm(weight, eps)

    def heads(self, heads: Heads) -> SplitHeads:
        return CpuHeads(heads)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_and_multiply(gate_up)


class CpuHeads:
    """Implements `SplitHeads`, in float32."""

    def __init__(self, heads: Heads) -> None:
        self.heads = heads

    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = qkv.float().contiguous().view(len(qkv), self.heads.queries + 2 * self.heads.keys, -1)
        self.heads.turn(heads, positions)
        q, k, v = torch.split(heads, [self.heads.queries, self.heads.keys, self.heads.keys], dim=1)
        return q, k, v


class TorchElementwise:
    """Plain torch, for any device: no operation waits for the device, or for another one's memory."""

    def norm(self, weight: torch.Tensor, eps: float) -> RowNorm:
        return TorchNorm(weight, eps)

    def heads(self, heads: Heads) -> SplitHeads:
        return TorchHeads(heads)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_and_multiply(gate_up)


class TorchNorm:
    """Implements `RowNorm`."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.norm = Norm(weight.float().contiguous(), eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.norm.weight.shape, self.norm.weight, self.norm.eps).to(x.dtype)


class TorchHeads:
    """Implements `SplitHeads`, in float32."""

    def __init__(self, heads: Heads) -> None:
        self._heads = heads
        norms = (heads.query_norm, heads.key_norm)
        self._norms = tuple(None if norm is None else TorchNorm(*norm) for norm in norms)

    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        queries, keys = self._heads.queries, self._heads.keys
        heads = qkv.float().contiguous().view(len(qkv), queries + 2 * keys, -1)
        q, k, v = torch.split(heads, [queries, keys, keys], dim=1)
        q, k = (x if norm is None else norm(x) for x, norm in zip((q, k), self._norms, strict=True))
        if self._heads.table is not None:
            turns = self._heads.table[positions][:, None]
            q, k = _turned(q, turns), _turned(k, turns)
        return q, k, v


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Each pair (a, b) of adjacent elements becomes (a cos - b sin, b cos + a sin). turns: [T, 1, size / 2, 2]."""
    a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = turns.unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """See `Elementwise.gate`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
