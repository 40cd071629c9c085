"""Watches every request to the engine: one log line and one set of measurements at its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from chatd.metrics import Metrics
from engine.api import (
    Admitted,
    Delta,
    Engine,
    EngineInfo,
    EngineSnapshot,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    SamplingParams,
)
from engine.errors import EngineStopped
from engine.text.api import ChatCodec

logger = logging.getLogger(__name__)


class ObservedEngine:
    """Implements `engine.api.Engine` around another one. After `refuse` it takes no new requests."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._live: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._refusing = False

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def codec(self) -> ChatCodec:
        return self._engine.codec

    def check(self, prompt_tokens: int, params: SamplingParams) -> None:
        self._check_open()
        self._engine.check(prompt_tokens, params)

    def submit(self, request: GenerateRequest) -> AsyncIterator[Event]:
        self._check_open()
        events = ObservedEvents(request, self._engine.submit(request), self._ended)
        self._live.add(request.id)
        self._idle.clear()
        return events

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def snapshot(self) -> EngineSnapshot:
        return self._engine.snapshot()

    async def flush(self) -> bool:
        return await self._engine.flush()

    async def close(self) -> None:
        await self._engine.close()

    def refuse(self) -> None:
        """From now on `check` and `submit` raise EngineStopped; what runs goes on."""
        self._refusing = True

    async def idle(self) -> None:
        """Waits until no request is under way."""
        await self._idle.wait()

    def _check_open(self) -> None:
        if self._refusing:
            raise EngineStopped("the server is shutting down")

    def _ended(self, request: GenerateRequest, admitted: Admitted | None, end: Finished | Failed) -> None:
        self._live.discard(request.id)
        if not self._live:
            self._idle.set()
        if isinstance(end, Finished):
            self._metrics.finished(end.reason, end.usage, end.timings)
            logger.info("%s", _line(request, admitted, end))
        else:
            self._metrics.failed()
            logger.warning(
                "request=%s session=%s failed=%s: %s", request.id, request.owner or "-", end.code, end.message
            )


class ObservedEvents:
    """The events of one request, passed through unchanged."""

    __slots__ = ("_admitted", "_ended", "_next", "_request")

    def __init__(
        self,
        request: GenerateRequest,
        events: AsyncIterator[Event],
        ended: Callable[[GenerateRequest, Admitted | None, Finished | Failed], None],
    ) -> None:
        self._request = request
        self._next = events.__anext__
        self._ended = ended
        self._admitted: Admitted | None = None

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        event = await self._next()
        if isinstance(event, Delta):
            return event
        if isinstance(event, Admitted):
            self._admitted = event
        elif isinstance(event, Finished | Failed):
            self._ended(self._request, self._admitted, event)
        return event


def _line(request: GenerateRequest, admitted: Admitted | None, end: Finished) -> str:
    usage, timings = end.usage, end.timings
    prefill = timings.prefill_ms / max(usage.prefilled_tokens, 1)
    decode = timings.decode_ms / max(usage.completion_tokens - 1, 1)
    ttft = "-" if timings.ttft_ms is None else f"{timings.ttft_ms:.1f}"
    miss = admitted.miss.replace(" ", "_") if admitted is not None and admitted.miss else "-"
    numbers = {
        "request": request.id,
        "session": request.owner or "-",
        "prompt": usage.prompt_tokens,
        "cached": usage.cached_tokens,
        "prefilled": usage.prefilled_tokens,
        "generated": usage.completion_tokens,
        "queue_ms": f"{timings.queue_ms:.1f}",
        "prefill_ms": f"{timings.prefill_ms:.1f}",
        "prefill_ms_per_token": f"{prefill:.2f}",
        "decode_ms": f"{timings.decode_ms:.1f}",
        "decode_ms_per_token": f"{decode:.2f}",
        "ttft_ms": ttft,
        "total_ms": f"{timings.total_ms:.1f}",
        "drafted": timings.drafted_tokens,
        "accepted": timings.accepted_tokens,
        "finish_reason": end.reason,
        "miss": miss,
    }
    return " ".join(f"{name}={value}" for name, value in numbers.items())
