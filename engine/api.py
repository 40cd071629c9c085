"""What the engine takes and gives: plain, picklable data and one protocol.

Nothing heavy is imported here, so that sessions/ and chatd/ can speak to an engine without loading torch.

    submit ── Queued ── Admitted ── Progress* ── Delta* ── Finished
                  └──────────┴──────────┴─────────┴─────── Failed

Every accepted request ends in exactly one terminal event, Finished or Failed; nothing follows it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from engine.text.api import ChatCodec

TokenIds = npt.NDArray[np.int32]
"""A one-dimensional, contiguous int32 array of token ids."""

FinishReason = Literal["stop", "length", "cancelled"]

MAX_TOP_LOGPROBS = 20
MAX_ENTRIES = 1024
MAX_STOP_CHARACTERS = 65_536


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text must be. source: a JSON schema as JSON text, a regular expression, or "" for any JSON object."""

    kind: Literal["json_object", "json_schema", "regex"]
    source: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token, under the OpenAI names; in this order: penalties and bias, temperature, filters.

    temperature: 0 is greedy (argmax of the unscaled logits). top_p: nucleus mass in [0, 1]; 0 is greedy.
    seed: the same seed gives the same text beside any other requests; None draws one.
    max_tokens: upper bound on generated tokens; None: all that the context and the pool still hold; 0: prefill only.
    min_tokens: eos and stop ids cannot be sampled before this many tokens, and stop strings are looked for only in the
    text after them. ignore_eos: a sampled eos id does not end the text; stop_token_ids still do.
    top_k: only the k most likely tokens; 0 is all, 1 is greedy. min_p: only tokens at least this share of the most
    likely one's probability. repetition_penalty: divides positive logits (multiplies negative ones) of every token of
    prompt and output (CTRL, arXiv 1909.05858); 1 is none. presence_penalty, frequency_penalty: taken off the logit of a
    token of the output, once and for each time. logit_bias: (id, added to its logit) pairs, at most 1,024.
    stop: the text ends before the first of these strings; at most 1,024 non-empty ones of 65,536 characters in all.
    The string that ends first counts, the longest of several that end together.
    logprobs: None, or how many of the most likely tokens to tell for each position, 0 to 20, beside the sampled one.
    grammar: None, or what the output must match.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 2.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be between {low:g} and {high:g}")
        if not 0.01 <= self.repetition_penalty <= 10.0:
            raise ValueError("repetition_penalty must be between 0.01 and 10")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError("seed must be between 0 and 2**63 - 1")
        if self.top_k < 0:
            raise ValueError("top_k must not be negative")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise ValueError("max_tokens must not be negative")
        if self.min_tokens < 0:
            raise ValueError("min_tokens must not be negative")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError("min_tokens must not exceed max_tokens")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"logprobs must be between 0 and {MAX_TOP_LOGPROBS}")
        if len(self.logit_bias) > MAX_ENTRIES or not all(-100 <= bias <= 100 for _, bias in self.logit_bias):
            raise ValueError(f"logit_bias takes at most {MAX_ENTRIES} tokens, each between -100 and 100")
        if len(self.stop) > MAX_ENTRIES or "" in self.stop:
            raise ValueError(f"stop takes at most {MAX_ENTRIES} strings, none of them empty")
        if sum(map(len, self.stop)) > MAX_STOP_CHARACTERS:
            raise ValueError(f"stop takes at most {MAX_STOP_CHARACTERS} characters in all")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_p == 0.0 or self.top_k == 1


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """`n` generations of one prompt, which is computed once. `id` is unique among live requests; `tokens` is the whole
    prompt, int32, at least one id. n: 1 up to the sequences that the engine runs at once; choice 0 is what n = 1 gives,
    the others draw from seeds of their own, which follow from the request's.

    namespace separates what must never share cached pages (tenant, salt); it has no U+0000. owner tags the pages (a
    session id). priority: higher is scheduled first; below zero is background work, which makes room for nobody and
    evicts nothing. tenant: who shares the engine fairly with other tenants. adapter: the name of a loaded LoRA adapter,
    which shares no cached pages with the others; None is the model itself. use_cache False computes every token anew
    and leaves nothing behind.
    """

    id: str
    tokens: TokenIds
    params: SamplingParams = field(default_factory=SamplingParams)
    namespace: str = ""
    owner: str | None = None
    priority: int = 0
    use_cache: bool = True
    n: int = 1
    tenant: str = ""
    adapter: str | None = None


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
    """Milliseconds. ttft = receipt to first sampled token; decode = first sampled token to last.

    drafted_tokens were guessed by speculation, accepted_tokens of them kept.
    """

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    ttft_ms: float | None
    total_ms: float
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


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
class TokenLogprob:
    """A token, its bytes (part of a character, maybe; none for a control token) and its natural log probability."""

    id: int
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class SampledLogprob:
    """The sampled token and the most likely ones at its position, most likely first; all finite."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """Sampled ids and exactly the text that they spell, of choice `index`.

    Ids are held back until the bytes of their last character are complete, and while their text may begin a stop
    string; ids of an unfinished character are dropped with it when the choice ends: the concatenated ids are always the
    exact companion of the concatenated text. An eos id comes with the text of the ids before it, or with "".
    logprobs: one for each id, where they were asked for. reason: on the last delta of a choice, why it ended.

    unspelled: above 0 only on a last delta, where the text ends inside a token (a stop string began there, or a
    character that was never finished): so many characters at the end of `text` are spelled by no id. That token and all
    after it, an eos as well, are left out of the ids; whoever keeps ids beside the text has to encode these characters.
    """

    request_id: str
    ids: tuple[int, ...]
    text: str
    index: int = 0
    logprobs: tuple[SampledLogprob, ...] = ()
    reason: FinishReason | None = None
    unspelled: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """All choices have ended. reason: that of choice 0, or `cancelled` for an aborted request. usage: the prompt once
    and the output of all choices. timings: decode lasts until the last token of any choice."""

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
    """What was loaded. context_length and pool_tokens in tokens, pool_bytes in bytes. adapters: their names."""

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
    adapters: tuple[str, ...] = ()

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
    """The engine's state between two steps. counters are those of cache.stats: they only grow. broken: it has ended by
    a fault of its own, and takes nothing any more."""

    running: int
    waiting: int
    pages: PoolPages
    counters: dict[str, int]
    steps: int
    preemptions: int
    broken: bool = False


class Engine(Protocol):
    """Tokens in, tokens out. Safe to call from the event loop; the model runs elsewhere."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def codec(self) -> ChatCodec: ...

    def check(self, prompt_tokens: int, params: SamplingParams) -> None:
        """Raises what `submit` would raise now: InvalidRequest (params), RequestTooLong, QueueFull, EngineStopped.

        May be called from any thread; the first time for a grammar it takes as long as compiling that.
        """
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
