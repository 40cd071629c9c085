"""What the engine takes and gives: plain, picklable data and one protocol.

Nothing heavy is imported here, so that sessions/ and chatd/ can speak to an engine without loading torch.

    submit ── Queued ── Admitted ── Progress* ── Delta* ── Finished
                  └──────────┴──────────┴─────────┴─────── Failed

Every accepted request ends in exactly one terminal event, Finished or Failed; nothing follows it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from engine.text.api import ChatCodec

TokenIds = npt.NDArray[np.int32]
"""A one-dimensional, contiguous int32 array of token ids."""

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token, under the OpenAI names.

    temperature: 0 is greedy (argmax of the unscaled logits). top_p: nucleus mass in [0, 1]; 0 is greedy.
    seed: the same seed gives the same text beside any other requests; None draws one.
    max_tokens: upper bound on generated tokens; None: all that the context and the pool still hold; 0: prefill only.
    min_tokens: eos and stop ids cannot be sampled before this many tokens. ignore_eos: a sampled eos id does not
    end the text; stop_token_ids still do.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 2.0:
            raise ValueError("temperature must be between 0 and 2")
        if not 0.0 <= self.top_p <= 1.0:
            raise ValueError("top_p must be between 0 and 1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError("seed must be between 0 and 2**63 - 1")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise ValueError("max_tokens must not be negative")
        if self.min_tokens < 0:
            raise ValueError("min_tokens must not be negative")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError("min_tokens must not exceed max_tokens")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_p == 0.0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. `id` is unique among live requests; `tokens` is the whole prompt, int32, at least one id.

    namespace separates what must never share cached pages (tenant, adapter, salt). owner tags the pages (a session id).
    priority: higher is scheduled first. use_cache False computes every token anew and leaves nothing behind.
    """

    id: str
    tokens: TokenIds
    params: SamplingParams = field(default_factory=SamplingParams)
    namespace: str = ""
    owner: str | None = None
    priority: int = 0
    use_cache: bool = True


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. prefilled = prompt - cached."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def prefilled_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds. ttft = receipt to first sampled token; decode = first sampled token to last."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    ttft_ms: float | None
    total_ms: float
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Queued:
    request_id: str


@dataclass(frozen=True, slots=True)
class Admitted:
    """The prompt was looked up and its pages are locked; `miss` says why not everything was found."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    miss: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Prefill so far: `processed` of `total` prompt tokens, `cached` of them found in the cache."""

    request_id: str
    processed: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Sampled ids and exactly the text that they spell.

    Ids are held back until the bytes of their last character are complete, and dropped with them when the request ends
    before that: the concatenated ids are always the exact companion of the concatenated text. An eos or stop id comes
    with the text of the ids before it, or with "".
    """

    request_id: str
    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    request_id: str
    reason: FinishReason
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class Failed:
    request_id: str
    code: str
    message: str


Event = Queued | Admitted | Progress | Delta | Finished | Failed


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What was loaded. context_length and pool_tokens in tokens, pool_bytes in bytes."""

    model: str
    fingerprint: str
    context_length: int
    page_size: int
    num_pages: int
    pool_bytes: int
    weights_dtype: str
    kv_dtype: str
    device: str
    default_params: SamplingParams

    @property
    def pool_tokens(self) -> int:
        return self.page_size * self.num_pages


@dataclass(frozen=True, slots=True)
class PoolPages:
    """Pages by state; they always sum to the pool."""

    free: int
    evictable: int
    locked: int
    private: int


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine's state between two steps. counters are those of cache.stats: they only grow."""

    running: int
    waiting: int
    pages: PoolPages
    counters: dict[str, int]
    steps: int
    preemptions: int


class Engine(Protocol):
    """Tokens in, tokens out. Safe to call from the event loop; the model runs elsewhere."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def codec(self) -> ChatCodec: ...

    def check(self, prompt_tokens: int, params: SamplingParams) -> None:
        """Raises what `submit` would raise now for this length: RequestTooLong, QueueFull, EngineStopped."""
        ...

    def submit(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """Queues the request at once (not at the first iteration) and gives its events, ending after the terminal one.

        An iterator that is closed or dropped does not abort the request: call `abort`.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Ends the request within a step, with Finished(reason="cancelled"). Unknown or ended ids are ignored."""
        ...

    def snapshot(self) -> EngineSnapshot: ...

    async def flush(self) -> bool:
        """Empties the prefix cache between two steps. False, and nothing changed, while any request holds pages."""
        ...

    async def close(self) -> None:
        """Ends every request with Failed(code="shutdown") and stops the engine's thread."""
        ...
