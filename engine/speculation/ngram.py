"""Guesses from the sequence itself: what followed the last time that the same few tokens came.

Prompt look-up decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding), over prompt and output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.api import TokenIds
from engine.speculation.drafter import CHECKING, Ask

SIZES = (4, 3, 2)
"""How many tokens must agree, the surest first."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class NgramDrafter:
    """Keeps an index for each sequence. A prompt costs 0.5 ms for each 1,000 tokens, once; a token 30 us."""

    cost = CHECKING

    def __init__(self) -> None:
        self._indices: dict[int, NgramIndex] = {}

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [self._indices.setdefault(ask.number, NgramIndex()).follow(ask.tokens, ask.at_most) for ask in asks]

    def drop(self, number: int) -> None:
        self._indices.pop(number, None)


class NgramIndex:
    """Where each n-gram of one growing sequence was last seen.

    tokens   a b c d x y z ....... a b c d         the last n-gram is looked up, then entered
                     ^ follows       n-gram        guesses: x y z ...
    """

    def __init__(self) -> None:
        # For each size the hash of an n-gram to the place behind it.
        self._behind: dict[int, dict[int, int]] = {size: {} for size in SIZES}
        self._entered = 0

    def follow(self, tokens: TokenIds, at_most: int) -> list[int]:
        """What followed the last earlier occurrence of the longest known n-gram at the end of `tokens`.

        Where that occurrence reaches into the end itself, as in a loop, the loop is gone through again and again.
        """
        self._enter(tokens, len(tokens) - 1)
        for size in SIZES:
            if len(tokens) <= size:
                continue
            end = tokens[-size:]
            behind = self._behind[size].get(int(_hashes(end, size)[0]))
            if behind is not None and np.array_equal(tokens[behind - size : behind], end):
                following: list[int] = np.resize(tokens[behind : behind + at_most], at_most).tolist()
                return following
        return []

    def _enter(self, tokens: TokenIds, end: int) -> None:
        """Enters all n-grams of tokens[:end] that are not entered yet; the last one of equals stays."""
        for size, behind in self._behind.items():
            first = max(0, self._entered - size + 1)
            if end - first >= size:
                hashes = _hashes(tokens[first:end], size)
                behind.update(zip(hashes.tolist(), range(first + size, end + 1), strict=True))
        self._entered = end


def _hashes(tokens: TokenIds, size: int) -> npt.NDArray[np.uint64]:
    """Of every n-gram in `tokens`, in order. Two may rarely be equal by chance: compare the tokens."""
    ids = tokens.astype(np.uint64)
    count = len(ids) - size + 1
    hashes = ids[:count]
    for offset in range(1, size):
        hashes = hashes * _FACTOR + ids[offset : offset + count]
    return hashes
