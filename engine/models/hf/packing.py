"""4-bit or 8-bit weights for the linear layers of a transformers model, at each start: the file keeps what it has."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.quant import DenseLinear, Int4Linear, Int8Linear, Linear, int4, int8
from engine.quant.linear import few_beside_dense


class _Packed(nn.Module):
    """One of our linear layers as a module over [..., K]."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1).to(x.dtype)


def pack_linears(module: PreTrainedModel, bits: Literal[4, 8]) -> int:
    """Replaces what can be packed, the head by 8-bit rows; gives the number of layers. Experts that are no linear
    layers of their own stay as they are."""
    head = module.get_output_embeddings()
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if (packed := _pack_head(child) if child is head else _pack(child, bits)) is not None:
                setattr(parent, name, _Packed(packed))
                count += 1
    return count


def _pack(child: nn.Module, bits: Literal[4, 8]) -> Linear | None:
    if type(child) not in (nn.Linear, Conv1D):
        return None
    dense, bias = child.get_parameter("weight").data, child.bias
    if type(child) is Conv1D:  # GPT-2's linear layer, [K, N]
        dense = dense.t().contiguous()
    added = bias.data if isinstance(bias, torch.Tensor) else None
    if bits == 8:
        return Int8Linear(*int8.quantize_rows(dense), added)
    if not int4.fits(*dense.shape):
        return None
    packed, scale_zero = int4.pack(int4.quantize(dense))
    return Int4Linear(packed, scale_zero, DenseLinear(dense, added), few_beside_dense(dense.dtype), added)


def _pack_head(head: nn.Module) -> Linear | None:
    if type(head) is not nn.Linear or head.bias is not None:
        return None
    return Int8Linear(*int8.quantize_rows(head.weight.data))
