"""Storage of keys and values, shared by all sequences: dense, or in 8 bits.

A pool deals in stretches of adjacent slots (slot = page * page_size + offset) over all layers. What is attended to is
always what the pool gives back: `rounded` says for new keys and values what that will be, so that nothing depends on
whether they have been in the pool in between.

    write(slot, kv); read(slot, n)  ==  kv      bit for bit, for every kv made of what `rounded` gave
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.attention.base import KVShape
from engine.native import multiplies_bfloat16

_SMALLEST_STEP = torch.finfo(torch.float32).tiny


class KVPool(Protocol):
    """dtype: of everything that goes in and comes out."""

    dtype: torch.dtype

    def rounded(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """k and v of one layer, [T, H, D] each, as the pool can hold them: [2, T, H, D]."""
        ...

    def write(self, slot: int, kv: torch.Tensor) -> None:
        """Stores kv, [2, layers, H, n, D] and rounded, in the slots from `slot` on."""
        ...

    def read(self, slot: int, out: torch.Tensor) -> None:
        """Fills `out`, [2, layers, H, n, D], from the slots from `slot` on."""
        ...


class DensePool:
    """Elements in the dtype of the shape: [2, layers, H, slots, D]."""

    def __init__(self, shape: KVShape, dtype: torch.dtype) -> None:
        """dtype: that of the shape, or float32."""
        self.dtype = dtype
        self._kv = torch.empty(_sizes(shape), dtype=shape.dtype)

    def rounded(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.stack((k, v)).to(self._kv.dtype).to(self.dtype)

    def write(self, slot: int, kv: torch.Tensor) -> None:
        self._kv[..., slot : slot + kv.shape[-2], :] = kv

    def read(self, slot: int, out: torch.Tensor) -> None:
        out.copy_(self._kv[..., slot : slot + out.shape[-2], :])


class Int8Pool:
    """127 steps to either side of zero; for each token and head the largest magnitude, in bfloat16, says how wide.

        q        [2, layers, H, slots, D]   int8       element = q * step, step = largest / 127
        largest  [2, layers, H, slots]      bfloat16

    The element of the largest magnitude has q = 127 or -127, and comes back as `largest`: in float32 up to an error
    that the next rounding to bfloat16 removes, in bfloat16 exactly. So `write` finds in rounded elements the very
    `largest` and q that they were made from, and a working copy need not keep them.
    """

    def __init__(self, shape: KVShape, dtype: torch.dtype) -> None:
        """dtype: float32 or bfloat16."""
        self.dtype = dtype
        self._q = torch.empty(_sizes(shape), dtype=torch.int8)
        self._largest = torch.empty(_sizes(shape)[:-1], dtype=torch.bfloat16)

    def rounded(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kv = torch.stack((k, v)).float()
        step = _step(_largest(kv))
        return kv.div_(step).round_().mul_(step).to(self.dtype)

    def write(self, slot: int, kv: torch.Tensor) -> None:
        end = slot + kv.shape[-2]
        largest = _largest(kv)
        self._q[..., slot:end, :] = (kv.float() / _step(largest)).round_()
        self._largest[..., slot:end] = largest[..., 0]

    def read(self, slot: int, out: torch.Tensor) -> None:
        end = slot + out.shape[-2]
        out.copy_(self._q[..., slot:end, :] * _step(self._largest[..., slot:end, None]))


def make_pool(shape: KVShape) -> KVPool:
    """The pool for the dtype of the shape. It deals in the type that this processor attends in faster: products in
    bfloat16 are slow where they are not native."""
    dense = torch.bfloat16 if shape.dtype != torch.float32 and multiplies_bfloat16() else torch.float32
    return Int8Pool(shape, dense) if shape.dtype == torch.int8 else DensePool(shape, dense)


def _sizes(shape: KVShape) -> tuple[int, ...]:
    return (2, shape.num_layers, shape.num_kv_heads, shape.num_pages * shape.page_size, shape.head_dim)


def _largest(kv: torch.Tensor) -> torch.Tensor:
    """[..., D] to [..., 1] bfloat16."""
    return kv.abs().amax(-1, keepdim=True).to(torch.bfloat16)


def _step(largest: torch.Tensor) -> torch.Tensor:
    """float32. The smallest is a power of two, so that what is rounded with it instead comes back exactly too."""
    return largest.float().div_(127).clamp_min_(_SMALLEST_STEP)
