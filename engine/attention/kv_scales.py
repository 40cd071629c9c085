"""Scales of keys and values that are kept in 8-bit floats: an element is stored as itself / scale.

e4m3 has 3 bits of mantissa: between 2 ** -6 and 448 it is within 2 ** -4 of any number, wherever that number lies. So a
scale need not be fine. It has to keep a layer's largest numbers below 448, where they are cut off, and its usual ones
above 2 ** -6, where steps no longer shrink with the number. Hence one power of two for the keys of a layer and one for
its values, which makes scaling itself exact.

    1.0           serves keys and values between about 0.02 and 448, which those of most layers are
    for_largest   serves all; values of first layers can be in the thousandths
    none          serves keys behind a bias of hundreds (Qwen2): an error of 2 ** -4 of the bias moves every score,
                  however it is scaled. Such models want bfloat16

tests/engine/test_fp8_kv.py measures all three. Scales belong to the model, and are found at load with a fixed text
(engine/calibration.py), never from requests: what a sequence is answered must not depend on who came first.

Source: FP8 Formats for Deep Learning (arXiv 2209.05433).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cache import TailCopy
from engine.attention.base import AttentionBackend, AttentionRow

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0

_ROOM = 2.0  # other texts have larger numbers than the one that was looked at


@dataclass(frozen=True, slots=True)
class KVScales:
    """keys, values: one for each layer. Raises ValueError for what is no power of two."""

    keys: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.values):
            raise ValueError(f"scales for the keys of {len(self.keys)} layers, and the values of {len(self.values)}")
        for scale in (*self.keys, *self.values):
            if not (0 < scale < math.inf and math.frexp(scale)[0] == 0.5):
                raise ValueError(f"a scale of {scale}, which is no power of two")

    @classmethod
    def ones(cls, num_layers: int) -> KVScales:
        return cls((1.0,) * num_layers, (1.0,) * num_layers)

    @classmethod
    def for_largest(cls, keys: Sequence[float], values: Sequence[float]) -> KVScales:
        """For layers whose keys and values are at most so large, with room for twice that."""
        return cls(tuple(map(_scale_for, keys)), tuple(map(_scale_for, values)))


@dataclass(frozen=True, slots=True)
class Fp8:
    """How keys and values are kept in e4m3. attend_dtype: what they are turned into when they are attended to."""

    scales: KVScales
    attend_dtype: torch.dtype


class WatchedAttention:
    """An AttentionBackend that leaves all to another, and remembers how large the keys and values of each layer are."""

    def __init__(self, attention: AttentionBackend, num_layers: int, device: torch.device) -> None:
        self._attention = attention
        self._largest = torch.zeros((num_layers, 2), device=device)

    def plan(self, rows: Sequence[AttentionRow]) -> None:
        self._attention.plan(rows)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        largest = torch.stack((k.abs().amax(), v.abs().amax())).to(self._largest.dtype)
        self._largest[layer] = torch.maximum(self._largest[layer], largest)
        return self._attention.run(layer, q, k, v)

    def fork(self, source: int, target: int, tokens: int, tail: TailCopy | None) -> None:
        self._attention.fork(source, target, tokens, tail)

    def drop(self, sequence: int) -> None:
        self._attention.drop(sequence)

    def scales(self) -> KVScales:
        """For what has been seen so far; 1.0 for a layer that has seen nothing, or what is not finite."""
        keys, values = self._largest.T.tolist()
        return KVScales.for_largest(keys, values)


def to_fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x / scale in e4m3. What is too large for it becomes the largest there is, NaN stays NaN."""
    scaled = x if scale == 1.0 else x * (1 / scale)
    return scaled.clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8)


def from_fp8(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of to_fp8, exact in any dtype that has the range."""
    wide = x.to(dtype)
    return wide if scale == 1.0 else wide.mul_(scale)


def _scale_for(largest: float) -> float:
    """The smallest power of two with largest / scale <= 448 / 2."""
    if not 0 < largest < math.inf:
        return 1.0
    return math.ldexp(1.0, math.ceil(math.log2(largest * _ROOM / LARGEST_FP8)))
