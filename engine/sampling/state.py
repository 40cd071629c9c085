"""What sampling remembers of one sequence from step to step."""

from __future__ import annotations

from collections import deque

import numpy as np

from engine.api import SamplingParams, TokenIds
from engine.sampling.arrays import Logits
from engine.sampling.draw import SHORTLIST, Draw
from engine.sampling.grammar import TokenMatcher
from engine.sampling.penalties import Bias, Penalties

_NEVER = np.float32("-inf")


class SamplingState:
    """Made with its sequence and kept through preemptions, so that these change nothing.

    eos_ids and the request's own stop ids are held back until min_tokens, but for a grammar that lets nothing else
    follow. The generator, Philox with the request's seed, gives one number for each token that is drawn.
    """

    def __init__(
        self, params: SamplingParams, eos_ids: frozenset[int], prompt: TokenIds, matcher: TokenMatcher | None = None
    ) -> None:
        self.params = params
        self._eos_ids = eos_ids
        self._held_back = np.array(sorted(eos_ids | set(params.stop_token_ids)), dtype=np.int64)
        self._generator = None if params.greedy else np.random.Generator(np.random.Philox(params.seed))
        self._drawn: deque[float] = deque()
        self._penalties = Penalties.of(params, prompt)
        self._bias = Bias(params.logit_bias) if params.logit_bias else None
        self._matcher = matcher
        self._generated = 0
        self._ended = False

    @property
    def ended(self) -> bool:
        """The grammar is satisfied and an eos id has been sampled: nothing can follow, whatever ignore_eos says."""
        return self._ended

    @property
    def edits(self) -> bool:
        """Whether `edit` would change the next row."""
        return (
            self._matcher is not None or self._penalties is not None or self._bias is not None or self._holding_back()
        )

    def edit(self, row: Logits) -> None:
        """Makes the model's logits [vocab] this request's, in place: what may not follow gets -inf.

        Raises GrammarError.
        """
        held = self._held_back if self._holding_back() else self._held_back[:0]
        if self._matcher is not None:
            allowed = self._matcher.allowed(len(row))
            if len(held):
                beside = allowed.copy()
                beside[held] = False
                allowed = beside if beside.any() else allowed
            row[~allowed] = _NEVER
        elif len(held):
            row[held] = _NEVER
        if self._penalties is not None:
            self._penalties.apply(row)
        if self._bias is not None:
            self._bias.apply(row)

    def uniform(self, ahead: int = 0) -> float | None:
        """The number for the token that comes `ahead` tokens behind the next one, in [0, 1); None where the request is
        greedy. The same however often it is asked for."""
        if self._generator is None:
            return None
        while len(self._drawn) <= ahead:
            self._drawn.append(self._generator.random())
        return self._drawn[ahead]

    def draw(self, ahead: int) -> Draw | None:
        """How the token `ahead` behind the next one is drawn from its logits alone; None: they have to be edited, or
        looked at, first."""
        params = self.params
        if self.edits or params.logprobs is not None or params.top_k > SHORTLIST:
            return None
        return Draw(params, self.uniform(ahead))

    def advance(self, token: int) -> None:
        """Takes note of the chosen token."""
        self._generated += 1
        if self._drawn:
            self._drawn.popleft()
        if self._penalties is not None:
            self._penalties.add(token)
        if self._matcher is not None:
            self._matcher.advance(token)
            self._ended = token in self._eos_ids

    def _holding_back(self) -> bool:
        return self._generated < self.params.min_tokens and len(self._held_back) > 0
