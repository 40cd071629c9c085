"""Packed weights, spelled out."""

from __future__ import annotations

import torch

from engine.quant import GroupedWeight
from engine.quant.grouped import Bits


def unpacked(packed: torch.Tensor, bits: Bits) -> GroupedWeight:
    """What `GroupedWeight.pack` packs, with the outputs that fill the last block: by the table in products.py."""
    blocks, groups, _ = packed.shape
    u = torch.zeros(blocks * 16, groups * 32, dtype=torch.uint8)
    halves = packed[..., 16 * 32 * bits // 8 :].contiguous().view(torch.float16).view(blocks, groups, 2, 16)
    scale, least = (halves[:, :, which].transpose(1, 2).reshape(blocks * 16, groups) for which in (0, 1))
    for quad in range(8):
        for output in range(16):
            for number in range(4):
                place = ((quad % 4 if bits == 4 else quad) * 16 + output) * 4 + number
                value = packed[..., place]
                if bits == 4:
                    value = value >> 4 if quad >= 4 else value & 15
                u.view(blocks, 16, groups, 32)[:, output, :, quad * 4 + number] = value
    return GroupedWeight(bits, u, scale, least)
