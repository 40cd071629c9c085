"""4-bit or 8-bit weights for the linear layers of a transformers model, at each start: the file keeps what it has."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.kernels import Products
from engine.quant import GroupedWeight, Linear, PackedLinear
from engine.quant.grouped import Bits


class _Packed(nn.Module):
    """One of our linear layers as a module over [..., K]."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1).to(x.dtype)


def pack_linears(module: PreTrainedModel, bits: Bits) -> int:
    """Replaces what can be packed, the head by 8-bit rows; gives the number of layers. Experts that are no linear
    layers of their own stay as they are."""
    head = module.get_output_embeddings()
    products, count = Products(), 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if (packed := _pack_head(child, products) if child is head else _pack(child, bits, products)) is not None:
                setattr(parent, name, _Packed(packed))
                count += 1
    return count


def _pack(child: nn.Module, bits: Bits, products: Products) -> Linear | None:
    if type(child) not in (nn.Linear, Conv1D):
        return None
    dense, bias = child.get_parameter("weight").data, child.bias
    if type(child) is Conv1D:  # GPT-2's linear layer, [K, N]
        dense = dense.t().contiguous()
    added = bias.data if isinstance(bias, torch.Tensor) else None
    if not GroupedWeight.fits(dense.shape[1]):
        return None
    return PackedLinear(products, GroupedWeight.of(dense, bits).pack(), len(dense), added)


def _pack_head(head: nn.Module, products: Products) -> Linear | None:
    if type(head) is not nn.Linear or head.bias is not None:
        return None
    return _pack(head, 8, products)
