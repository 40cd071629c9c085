"""From a row of logits and one uniform number to a token.

The order is that of transformers' samplers: temperature, top_k, top_p of what is left, min_p. Each keeps the most
likely token, so there is always a candidate.

A row is worked on alone, in float64, by operations that see nothing but this row: the token is the same to the bit
whatever else is in the batch. That also is the quickest on a CPU, where a row of float64 just fits a core's cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.api import SamplingParams
from engine.sampling.arrays import Indices, Logits, Weights, largest

SHORTLIST = 1024
"""Sorting a whole vocabulary costs milliseconds; the nucleus is nearly always among this many most likely tokens."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How a token follows from a row of logits alone. uniform: in [0, 1); None: it is the most likely one."""

    params: SamplingParams
    uniform: float | None


def draw(row: Logits, best: int, params: SamplingParams, uniform: float) -> int:
    """A token by the inverse of the cumulative distribution at `uniform` in [0, 1). row[best] is the finite maximum."""
    if not 0 < params.top_k < len(row) and params.top_p >= 1.0 and params.min_p == 0.0:
        return invert(_weights(row, row[best], params.temperature), uniform)
    ids, weights = candidates(row, best, params)
    return int(ids[invert(weights, uniform)])


def candidates(row: Logits, best: int, params: SamplingParams) -> tuple[Indices, Weights]:
    """The ids that the filters leave, ascending, at least one, and their weights; the best has weight 1."""
    if 0 < params.top_k < len(row):
        ids = largest(row, params.top_k)
        weights = _weights(row[ids], row[best], params.temperature)
    else:
        ids, weights = np.arange(len(row)), _weights(row, row[best], params.temperature)
    if params.top_p < 1.0:
        kept = _nucleus(weights, params.top_p)
        ids, weights = ids[kept], weights[kept]
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= params.min_p)
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def _weights(values: Logits, top: np.float32, temperature: float) -> Weights:
    """exp((values - top) / temperature): the softmax but for its denominator."""
    weights = values.astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        weights -= float(top)
        weights /= temperature
        return np.exp(weights, out=weights)


def _nucleus(weights: Weights, top_p: float) -> Indices:
    """The places of the fewest largest weights that reach top_p of all (arXiv 1904.09751), ascending.

    Those below (1 - top_p) / len of the sum come to less than 1 - top_p of it between them: none is in the nucleus.
    """
    total = float(weights.sum())
    wanted = top_p * total
    likely = np.flatnonzero(weights >= (1.0 - top_p) * total / len(weights))
    values = weights[likely]
    shortlist = values if len(values) <= SHORTLIST else np.partition(values, len(values) - SHORTLIST)[-SHORTLIST:]
    size = _reaching(shortlist, wanted)
    if size > len(shortlist):
        size = _reaching(values, wanted)
    return likely[largest(values, min(size, len(values)))]


def _reaching(weights: Weights, wanted: float) -> int:
    """How many of the largest weights reach `wanted` together; one more than there are, where all do not."""
    return int(np.searchsorted(np.cumsum(np.sort(weights)[::-1]), wanted)) + 1


def invert(weights: Weights, uniform: float) -> int:
    """The index at which the cumulative sum of `weights` passes uniform * total; never one of weight 0."""
    cumulative = torch.from_numpy(weights).cumsum(0).numpy()  # four times as fast as numpy's, and serial as well
    total = cumulative[-1]
    return int(np.searchsorted(cumulative, min(uniform * total, np.nextafter(total, 0.0)), side="right"))
