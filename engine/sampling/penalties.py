"""What a request's earlier tokens, and its own wishes, do to the logits of single tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.api import SamplingParams, TokenIds
from engine.sampling.arrays import Indices, Logits


class Penalties:
    """Repetition, presence and frequency penalties of one sequence: O(1) a token, O(distinct tokens) a step.

    Repetition (CTRL, arXiv 1909.05858) looks at prompt and output, the other two at the output alone, so the ids of the
    prompt are kept only where repetition is penalized, with a count of 0.
    """

    def __init__(self, params: SamplingParams, prompt: TokenIds) -> None:
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        known = np.unique(prompt) if self._repetition != 1.0 else prompt[:0]
        self._size = len(known)
        self._ids = np.zeros(max(64, 2 * self._size), dtype=np.int64)
        self._ids[: self._size] = known
        self._counts = np.zeros(len(self._ids), dtype=np.int64)
        self._slots = {int(token): slot for slot, token in enumerate(known)}

    @staticmethod
    def of(params: SamplingParams, prompt: TokenIds) -> Penalties | None:
        """None where nothing is penalized."""
        neutral = params.repetition_penalty == 1.0 and params.presence_penalty == params.frequency_penalty == 0.0
        return None if neutral else Penalties(params, prompt)

    def add(self, token: int) -> None:
        """Counts one token of output."""
        slot = self._slots.setdefault(token, self._size)
        if slot == self._size:
            if slot == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[slot] = token
            self._size += 1
        self._counts[slot] += 1

    def apply(self, row: Logits) -> None:
        """Changes the logits of one row, in place."""
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        values = row[ids]
        if self._repetition != 1.0:
            with np.errstate(over="ignore"):
                values = np.where(values > 0, values / self._repetition, values * self._repetition)
            values = np.minimum(values, np.finfo(np.float32).max)
        if self._presence or self._frequency:
            values = values - (self._frequency * counts + self._presence * (counts > 0))
        row[ids] = values


class Bias:
    """logit_bias of one request: ids and what is added to their logits; an id that comes twice counts twice."""

    def __init__(self, pairs: tuple[tuple[int, float], ...]) -> None:
        added: dict[int, float] = {}
        for token, bias in pairs:
            added[token] = added.get(token, 0.0) + bias
        self._ids, self._values = _columns(added)

    def apply(self, row: Logits) -> None:
        row[self._ids] += self._values


def _columns(table: Mapping[int, float]) -> tuple[Indices, Logits]:
    return np.array(list(table), dtype=np.int64), np.array(list(table.values()), dtype=np.float32)
