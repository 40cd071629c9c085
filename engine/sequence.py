"""One running sequence: its tokens, how many of them have keys and values, and its lease on the pool."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cache import Lease
from engine.api import GenerateRequest, Timings, TokenIds
from engine.output import ChoiceOutput
from engine.sampling import SamplingState


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of one choice of a request, from submit or fork to its end. Owned by the engine's thread.

        tokens  |<---- prompt ---->|<---- output ---->|<-expected->|        |
                |<------- computed ------>|<-------pending-------->|        |
                0                                 num_tokens     length    capacity

    Computed tokens have K and V, or get them in a step that was launched. Pending ones go through the model next: one
    in decode, more in prefill or after a preemption. When nothing is pending the last row's logits give the next token.
    Expected ones are chosen by launched steps and not known here yet. `arrived` is the scheduler's step at which it was
    added.
    """

    number: int
    index: int
    request: GenerateRequest
    sampling: SamplingState
    output: ChoiceOutput
    capacity: int
    received: float
    tokens: TokenIds = field(init=False)
    num_tokens: int = field(init=False)
    expected: int = 0
    computed: int = 0
    lease: Lease | None = None
    cached_tokens: int = 0
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    arrived: int = 0

    def __post_init__(self) -> None:
        self.num_tokens = len(self.request.tokens)
        self.tokens = np.empty(self.capacity, dtype=np.int32)
        self.tokens[: self.num_tokens] = self.request.tokens

    @property
    def cache_namespace(self) -> str:
        """Who may read this sequence's pages: keys and values of one adapter are wrong under any other.

        A request's own namespace has no U+0000, so that none can be equal to one made here.
        """
        request = self.request
        return request.namespace if request.adapter is None else f"{request.namespace}\0adapter:{request.adapter}"

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.tokens)

    @property
    def generated(self) -> int:
        return self.num_tokens - self.prompt_tokens

    @property
    def pending(self) -> int:
        return self.length - self.computed

    @property
    def length(self) -> int:
        return self.num_tokens + self.expected

    @property
    def background(self) -> bool:
        return self.request.priority < 0

    @property
    def full(self) -> bool:
        return self.num_tokens >= self.capacity

    @property
    def expects_last(self) -> bool:
        """Whatever launched steps give, nothing more is to be computed."""
        return self.expected > 0 and self.length >= self.capacity

    def append(self, token: int, now: float) -> None:
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1
        self.last_token = now
        if self.first_token is None:
            self.first_token = now

    def timings(self, now: float) -> Timings:
        """Durations so far; a phase that was not reached took 0 ms."""
        admitted = now if self.admitted is None else self.admitted
        first = now if self.first_token is None else self.first_token
        last = first if self.last_token is None else self.last_token
        return Timings(
            queue_ms=(admitted - self.received) * 1e3,
            prefill_ms=(first - admitted) * 1e3 if self.admitted is not None else 0.0,
            decode_ms=(last - first) * 1e3,
            ttft_ms=None if self.first_token is None else (first - self.received) * 1e3,
            total_ms=(now - self.received) * 1e3,
            preemptions=self.preemptions,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
        )
