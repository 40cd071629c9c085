"""The protocol between the model and whatever computes attention over paged keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from cache import TailCopy


@dataclass(frozen=True, slots=True)
class KVShape:
    """Sizes of the pool; its K and V together take `num_pages * page_bytes` bytes.

    dtype: float32, bfloat16, on CUDA also float16 and float8_e4m3fn, whose scales are those of a layer (kv_scales.py);
    or int8, which has a scale of two bytes beside the elements of each token and head.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        scale = 2 if self.dtype == torch.int8 else 0
        return 2 * self.num_layers * self.num_kv_heads * self.page_size * (self.head_dim * self.dtype.itemsize + scale)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What is particular to the attention of one layer.

    window: a token sees itself and the window - 1 tokens before it, None: all of them. K and V of older tokens are kept
    all the same, so that every layer of a prefix can be shared. softcap: scores become softcap * tanh(score / softcap)
    (Gemma 2, arXiv 2408.00118). scale: what scores are multiplied by, None: head_dim ** -0.5.
    """

    window: int | None = None
    softcap: float | None = None
    scale: float | None = None

    @property
    def window_left(self) -> int:
        """The window without the token itself, as kernels count it; -1: all."""
        return -1 if self.window is None else self.window - 1


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One sequence in a step: its tokens start .. start + count - 1 are computed, those before `start` have K and V.

    What an earlier step has stored from `start` on (guesses that were not kept) is lost: it is written over.

    sequence: a number that stays the same while the sequence keeps its pages. pages: its page table, int32, long enough
    for start + count tokens. capacity: the most tokens that the sequence may ever hold.
    """

    sequence: int
    pages: npt.NDArray[np.int32]
    start: int
    count: int
    capacity: int


def pages_for(tokens: int, page_size: int) -> int:
    """How many pages so many tokens take."""
    return -(-tokens // page_size)


def layers_of(shape: KVShape, layers: Sequence[LayerAttention] | None) -> tuple[LayerAttention, ...]:
    """One for each layer of the shape; None: all of them plain. Raises ValueError if there are more or fewer."""
    given = tuple(layers) if layers is not None else (LayerAttention(),) * shape.num_layers
    if len(given) != shape.num_layers:
        raise ValueError(f"{shape.num_layers} layers, but the attention of {len(given)}")
    return given


def scale_of(layer: LayerAttention, head_dim: int) -> float:
    """What scores are multiplied by."""
    scale: float = layer.scale if layer.scale is not None else head_dim**-0.5
    return scale


class AttentionBackend(Protocol):
    """`plan` once a step, then `run` once for each layer, in order; `drop` when a sequence ends or loses its pages.

    `fork` between two steps, when a sequence gets a second branch.
    """

    def plan(self, rows: Sequence[AttentionRow]) -> None:
        """Prepares a step whose flat tokens are those of `rows`, one after the other."""
        ...

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Stores k and v ([T, Hkv, D], after RoPE) and attends causally with q ([T, Hq, D]); gives [T, Hq, D], in the
        dtype in which it attends.

        After the last layer, the pages of every row hold K and V of all its tokens.
        """
        ...

    def fork(self, source: int, target: int, tokens: int, tail: TailCopy | None) -> None:
        """`target`, a new sequence, has the K and V of the first `tokens` tokens of `source`.

        Full pages are in both page tables; `tail` says what to copy of the page that is not full, None: there is none.
        """
        ...

    def drop(self, sequence: int) -> None:
        """Forgets what is kept for a sequence besides its pages. Unknown numbers are ignored."""
        ...
