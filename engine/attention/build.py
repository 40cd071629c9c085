"""A backend for what was chosen."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.base import AttentionBackend, KVShape, LayerAttention
from engine.attention.choice import Choice
from engine.attention.cpu import CpuAttention
from engine.attention.fixed_decode import FixedDecode
from engine.attention.flash_attn import FlashAttnAttention
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.kv_scales import Fp8
from engine.attention.paged_kv import PagedKV
from engine.attention.torch_paged import TorchPagedAttention


def build_attention(
    choice: Choice,
    shape: KVShape,
    layers: Sequence[LayerAttention],
    num_heads: int,
    device: torch.device,
    fixed: FixedDecode | None = None,
    fp8: Fp8 | None = None,
) -> AttentionBackend:
    """With a pool of that shape on the device. num_heads: of queries. fixed: for backends that can be captured. fp8:
    for keys and values in e4m3; None: with scales of 1.0.

    Raises AttentionUnavailable.
    """
    if choice.name == "native":
        return CpuAttention(shape, layers)
    kv = PagedKV(shape, device, fp8.scales, fp8.attend_dtype) if fp8 is not None else PagedKV(shape, device)
    if choice.name == "flashinfer":
        return FlashInferAttention(kv, layers, num_heads, fixed)
    if choice.name == "flash-attn" and choice.decode == "flashinfer":
        return FlashAttnAttention(kv, layers, FlashInferAttention(kv, layers, num_heads))
    plain = TorchPagedAttention.quickest(kv, layers)
    return plain if choice.name == "torch-paged" else FlashAttnAttention(kv, layers, plain)
