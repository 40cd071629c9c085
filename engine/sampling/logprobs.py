"""Log probabilities as the model gave them: before penalties, bias, grammar, temperature and filters."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from engine.api import MAX_TOP_LOGPROBS, SampledLogprob, TokenLogprob
from engine.sampling.arrays import Logits, largest

BytesOf = Callable[[int], bytes]
"""What a token adds to a text."""


def logprobs_of(row: Logits, token: int, top: int, bytes_of: BytesOf) -> SampledLogprob:
    """The natural log probability of `token` in a row of raw logits, and those of the `top` most likely ones.

    Tokens of no probability are left out. Always the same number is ranked, so that among equals the choice does not
    depend on `top`.
    """
    ranked = largest(row, MAX_TOP_LOGPROBS)
    ranked = ranked[np.argsort(-row[ranked], kind="stable")][:top]
    best = float(row.max())
    shifted = row.astype(np.float64)
    shifted -= best
    normalizer = best + math.log(float(np.exp(shifted, out=shifted).sum()))

    def entry(id: int) -> TokenLogprob:
        return TokenLogprob(id, bytes_of(id), float(row[id]) - normalizer)

    return SampledLogprob(entry(token), tuple(entry(int(id)) for id in ranked))
