"""The choices of one request: sequences that share a prompt and end on their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engine.api import FinishReason, GenerateRequest, SamplingParams, Timings, Usage
from engine.sequence import Sequence
from engine.text.stops import StopStrings


@dataclass(slots=True, eq=False)
class Choices:
    """One request from submit to its terminal event. Owned by the engine's thread.

    sequences: by index. The first is there from the start and computes the prompt; the others are made when it is about
    to sample, so that the prompt is computed once.
    """

    request: GenerateRequest
    stops: StopStrings
    sequences: list[Sequence]

    @property
    def first(self) -> Sequence:
        return self.sequences[0]

    @property
    def missing(self) -> range:
        """The indices of the choices that are not made yet."""
        return range(len(self.sequences), self.request.n)

    @property
    def unended(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.output.reason is None]

    @property
    def reason(self) -> FinishReason | None:
        """Why the request has ended: the first choice's reason. None while any choice goes on."""
        return None if self.missing or self.unended else self.first.output.reason

    def usage(self) -> Usage:
        generated = sum(sequence.generated for sequence in self.sequences)
        return Usage(self.first.prompt_tokens, self.first.cached_tokens, generated)

    def timings(self, now: float) -> Timings:
        """Those of the first choice, decode until the last token of any."""
        timings = self.first.timings(now)
        started = self.first.first_token
        ends = [sequence.last_token for sequence in self.sequences if sequence.last_token is not None]
        return replace(
            timings,
            decode_ms=0.0 if started is None else (max(ends) - started) * 1e3,
            preemptions=sum(sequence.preemptions for sequence in self.sequences),
            drafted_tokens=sum(sequence.drafted for sequence in self.sequences),
            accepted_tokens=sum(sequence.accepted for sequence in self.sequences),
        )


def choice_params(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of choice `index`: the request's own, with a seed that follows from the request's and the index.

    Choice 0 keeps the seed. Without one every choice draws its own.
    """
    if index == 0 or params.seed is None:
        return params
    [seed] = np.random.SeedSequence((params.seed, index)).generate_state(1, np.uint64)
    return replace(params, seed=int(seed) >> 1)
