"""The arrays that sampling works on: rows of logits, weights, and token ids."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
"""[vocab] float32."""

Weights = npt.NDArray[np.float64]
"""Probabilities up to a common factor, float64."""

Indices = npt.NDArray[np.int64]
"""Token ids, or places in another array."""


def largest(values: Logits | Weights, count: int) -> Indices:
    """The places of the `count` largest values, in ascending order; among equals the first ones. None that is -inf."""
    lowest = np.finfo(values.dtype).min
    if count < len(values):
        lowest = max(lowest, np.partition(values, len(values) - count)[len(values) - count])
    places = np.flatnonzero(values >= lowest)
    if len(places) > count:
        equal = np.flatnonzero(values[places] == lowest)
        places = np.delete(places, equal[count - len(places) :])
    return places
