"""One layer of the compact decoder, and how its parts are computed one by one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.models.elementwise import Elementwise, RowNorm, SplitHeads
from engine.quant import Linear, PackedLinear


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """heads: what happens to queries and keys before attention."""

    attention_norm: RowNorm
    qkv: Linear
    heads: SplitHeads
    out: Linear
    mlp_norm: RowNorm
    gate_up: Linear
    down: Linear


def after_norm(norm: RowNorm, linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """linear(norm(x))"""
    return linear(x, norm=norm.norm) if isinstance(linear, PackedLinear) else linear(norm(x))


def add(linear: Linear, x: torch.Tensor, residual: torch.Tensor) -> None:
    """residual += linear(x)"""
    if isinstance(linear, PackedLinear):
        linear(x, add_to=residual)
    else:
        residual.add_(linear(x))


def add_gated(linear: Linear, gate_up: torch.Tensor, residual: torch.Tensor, elementwise: Elementwise) -> None:
    """residual += linear(silu(gate) * up), of gate and up side by side"""
    if isinstance(linear, PackedLinear):
        linear(gate_up, gated=True, add_to=residual)
    else:
        residual.add_(linear(elementwise.gate(gate_up)))
