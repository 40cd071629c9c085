"""The logits of a step to tokens: each row by the state of the sequence that samples from it."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal

import torch

from engine.api import SampledLogprob
from engine.sampling.draw import draw
from engine.sampling.grammar import GrammarError
from engine.sampling.logprobs import BytesOf, logprobs_of
from engine.sampling.state import SamplingState


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next token of a row. logprob: where the request asks for it."""

    token: int
    logprob: SampledLogprob | None = None


@dataclass(frozen=True, slots=True)
class NoCandidate:
    """A row from which nothing can be sampled, and why; the other rows do not notice.

    code: no_candidate where the request leaves nothing over, bad_logits where the model gave nothing finite.
    """

    reason: str
    code: Literal["no_candidate", "bad_logits"] = "no_candidate"


BAD_LOGITS = NoCandidate("the logits hold no finite maximum", "bad_logits")


class Sampler:
    """Samples from the logits of one step. One argmax serves all rows; one that stays as it is and is greedy costs
    nothing more. Keeps nothing: all that lasts is in the states."""

    def __init__(self, logits: torch.Tensor, bytes_of: BytesOf) -> None:
        """logits: [S, vocab] float32, which may be changed. bytes_of: what a token adds to a text, told beside its log
        probability."""
        self._rows = logits.numpy()
        self._best: list[int] = self._rows.argmax(-1).tolist()  # the place of a NaN where there is one
        self._bytes_of = bytes_of

    def choose(self, place: int, state: SamplingState) -> Sampled | NoCandidate:
        """The next token by row `place`, which is used up, and by `state`, which goes on."""
        row, best = self._rows[place], self._best[place]
        if not isfinite(row[best]):
            return BAD_LOGITS
        asked = state.params.logprobs
        raw = row
        if state.edits:
            raw = row if asked is None else row.copy()
            try:
                state.edit(row)
            except GrammarError as error:
                return NoCandidate(str(error))
            best = int(row.argmax())
            if not isfinite(row[best]):
                return NoCandidate("nothing that may follow has a finite logit")
        uniform = state.uniform()
        token = best if uniform is None else draw(row, best, state.params, uniform)
        state.advance(token)
        return Sampled(token, None if asked is None else logprobs_of(raw, token, asked, self._bytes_of))
