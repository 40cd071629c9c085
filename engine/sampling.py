"""Choosing the next token of one row, by the request's parameters and nothing else.

The draw is one uniform number per token from the request's own generator, turned into a token by the inverse of the
cumulative distribution: neither the batch, nor the cache, nor a preemption can change which number a token gets.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.api import SamplingParams

NUCLEUS_CANDIDATES = 1024
"""Sorting a whole vocabulary costs milliseconds; the nucleus is nearly always among this many most likely tokens."""


class NoCandidate(ValueError):
    """The logits hold a NaN or no finite value: there is nothing to sample from."""


class Sampler:
    """Samples for one request. `eos_ids` are held back until min_tokens, as the request's own stop ids are."""

    def __init__(self, params: SamplingParams, eos_ids: frozenset[int]) -> None:
        self._params = params
        self._generator = None if params.greedy else np.random.Generator(np.random.Philox(params.seed))
        self._held_back = sorted(eos_ids | set(params.stop_token_ids))

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, generated: int) -> int:
        """The next id from logits [vocab] float32, which may be changed, after `generated` tokens of output.

        Raises NoCandidate.
        """
        if generated < self._params.min_tokens and self._held_back:
            logits[self._held_back] = float("-inf")
        best = int(logits.argmax())
        if not torch.isfinite(logits[best]):  # argmax gives a NaN where there is one
            raise NoCandidate("the logits hold no finite maximum")
        if self._generator is None:
            return best
        return self._draw(logits, self._generator.random())

    def _draw(self, logits: torch.Tensor, uniform: float) -> int:
        probabilities = torch.softmax(logits.double() / self._params.temperature, dim=-1)
        if self._params.top_p >= 1.0:
            return _invert(probabilities, uniform)
        top_p = self._params.top_p
        likely, ids = probabilities.topk(min(NUCLEUS_CANDIDATES, len(probabilities)))
        if float(likely.sum()) < top_p:
            likely, ids = probabilities.sort(descending=True)
        # The nucleus: the most likely tokens up to and with the one that reaches top_p.
        size = int(torch.searchsorted(likely.cumsum(-1), top_p)) + 1
        return int(ids[_invert(likely[:size], uniform)])


def _invert(weights: torch.Tensor, uniform: float) -> int:
    """The index at which the cumulative sum of `weights` passes uniform * total; never one of weight 0."""
    cumulative = weights.cumsum(-1)
    index = int(torch.searchsorted(cumulative, uniform * float(cumulative[-1]), right=True))
    return min(index, int(torch.nonzero(weights)[-1]) if index >= len(weights) else index)
