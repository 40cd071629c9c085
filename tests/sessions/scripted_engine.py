"""An engine that does what the test says, when the test says it, and checks all that it is given."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Callable, Iterable

import numpy as np

from engine.api import (
    Admitted,
    Delta,
    EngineInfo,
    EngineSnapshot,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    PoolPages,
    Progress,
    Queued,
    SamplingParams,
    Timings,
    Usage,
)
from engine.errors import EngineBroken, EngineStopped, QueueFull, RequestTooLong
from tests.sessions.letters_codec import END, LettersCodec, token, token_bytes

PAGE = 16
TIMINGS = Timings(1.0, 2.0, 3.0, 4.0, 6.0, drafted_tokens=8, accepted_tokens=5)


class Live:
    """One request under way; the test, or the engine's `reply`, drives it."""

    def __init__(self, engine: ScriptedEngine, request: GenerateRequest) -> None:
        self.request = request
        self.output: list[int] = []
        self.cached = 0
        self.ended = False
        self._engine = engine
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._put(Queued(request.id))

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    def _put(self, event: Event) -> None:
        assert not self.ended, "nothing follows the terminal event"
        self._events.put_nowait(event)

    def admit(self) -> None:
        tokens = self.request.tokens
        shared = max((common(tokens, seen) for seen in self._engine.seen), default=0)
        self.cached = min(shared // PAGE * PAGE, (len(tokens) - 1) // PAGE * PAGE)
        self._put(Admitted(self.request.id, len(tokens), self.cached, "" if self.cached else "cold"))
        self._put(Progress(self.request.id, len(tokens), len(tokens), self.cached))

    def say(self, text: str) -> None:
        self.say_ids(token(byte) for byte in text.encode())

    def say_ids(self, ids: Iterable[int]) -> None:
        for id in ids:
            self.output.append(id)
            self._put(Delta(self.request.id, (id,), self._decoder.decode(token_bytes(id))))

    def cut(self, ids: Iterable[int], text: str, unspelled: int) -> None:
        """A last delta whose text ends inside a token, at a stop string."""
        self.output += (sent := tuple(ids))
        self._put(Delta(self.request.id, sent, text, reason="stop", unspelled=unspelled))

    def finish(self, reason: FinishReason = "stop") -> None:
        if reason == "stop":
            self.say_ids([END])
        self.close_with(reason)

    def close_with(self, reason: FinishReason) -> None:
        """The terminal event alone."""
        usage = Usage(len(self.request.tokens), self.cached, len(self.output))
        self._put(Finished(self.request.id, reason, usage, TIMINGS))
        self._end()

    def fail(self, code: str = "boom", message: str = "it broke") -> None:
        self._put(Failed(self.request.id, code, message))
        self._end()

    def _end(self) -> None:
        self.ended = True
        self._engine.seen.append(np.concatenate([self.request.tokens, np.asarray(self.output, dtype=np.int32)]))
        self._engine.live.pop(self.request.id, None)

    async def events(self) -> AsyncIterator[Event]:
        while True:
            event = await self._events.get()
            yield event
            if isinstance(event, Finished | Failed):
                return


class ScriptedEngine:
    """reply: text to answer a request with at once; None leaves every request to the test (see `latest`)."""

    def __init__(
        self,
        codec: LettersCodec | None = None,
        *,
        context_length: int = 4096,
        num_pages: int = 1024,
        max_waiting: int = 64,
        reply: Callable[[GenerateRequest], str] | None = None,
        default_params: SamplingParams = SamplingParams(temperature=0.5),
        adapters: tuple[str, ...] = (),
    ) -> None:
        self._codec = codec or LettersCodec()
        self._info = EngineInfo(
            model="scripted",
            fingerprint=self._codec.fingerprint,
            context_length=context_length,
            page_size=PAGE,
            num_pages=num_pages,
            pool_bytes=num_pages,
            weights_dtype="none",
            kv_dtype="none",
            device="test",
            default_params=default_params,
            adapters=adapters,
        )
        self.reply = reply
        self.max_waiting = max_waiting
        self.obeys_abort = True
        self.live: dict[str, Live] = {}
        self.all: list[Live] = []
        self.aborted: list[str] = []
        self.seen: list[np.ndarray] = []
        self.stopped = self.broken = False

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def codec(self) -> LettersCodec:
        return self._codec

    @property
    def latest(self) -> Live:
        return self.all[-1]

    def check(self, prompt_tokens: int, params: SamplingParams) -> None:
        assert type(prompt_tokens) is int
        assert prompt_tokens > 0
        assert isinstance(params, SamplingParams)
        if self.broken:
            raise EngineBroken("broken")
        if self.stopped:
            raise EngineStopped("stopped")
        if prompt_tokens + (params.max_tokens or 0) > self.info.context_length:
            raise RequestTooLong(prompt_tokens, params.max_tokens, self.info.context_length, "context")
        if prompt_tokens + 1 > self.info.pool_tokens:
            raise RequestTooLong(prompt_tokens, params.max_tokens, self.info.pool_tokens, "pool")
        if len(self.live) >= self.max_waiting:
            raise QueueFull(len(self.live))

    def submit(self, request: GenerateRequest) -> AsyncIterator[Event]:
        assert request.id not in self.live
        assert request.id.startswith("gen_")
        assert isinstance(request.tokens, np.ndarray)
        assert request.tokens.dtype == np.int32
        assert request.tokens.ndim == 1
        assert request.tokens.flags.c_contiguous
        assert isinstance(request.namespace, str)
        assert request.owner is not None
        assert request.owner.startswith("ses_")
        assert (request.priority, request.use_cache) == (0, True)
        self.check(len(request.tokens), request.params)
        live = Live(self, request)
        self.live[request.id] = live
        self.all.append(live)
        if self.reply is not None:
            live.admit()
            live.say(self.reply(request))
            live.finish()
        return live.events()

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        live = self.live.get(request_id)
        if live is not None and self.obeys_abort:
            live.finish("cancelled")

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(len(self.live), 0, PoolPages(self.info.num_pages, 0, 0, 0), {}, 0, 0, self.broken)

    async def flush(self) -> bool:
        self.seen.clear()
        return not self.live

    async def close(self) -> None:
        self.stopped = True
        for live in list(self.live.values()):
            live.fail("shutdown", "the engine stops")


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
