"""The engine in this process: one thread that owns torch, an inbox, and one hop to the event loop for each step."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace

import numpy as np

from cache import PrefixCache
from engine.api import (
    Admitted,
    EngineInfo,
    EngineSnapshot,
    Failed,
    Finished,
    GenerateRequest,
    PoolPages,
    Queued,
    SamplingParams,
)
from engine.choices import Choices
from engine.config import EngineConfig
from engine.errors import EngineBroken, EngineStopped, InvalidRequest, QueueFull
from engine.intake import Intake
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.speculation import Drafter, Speculator
from engine.stepper import Stepper
from engine.streams import EventStream, deliver
from engine.text import Codec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Submit:
    choices: Choices


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Flush:
    done: Future[bool]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class LocalEngine:
    """Implements `engine.api.Engine`. Built by `engine.loading.load_engine`; call `close` to end its thread."""

    def __init__(
        self,
        info: EngineInfo,
        codec: Codec,
        runner: ModelRunner,
        cache: PrefixCache,
        config: EngineConfig,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._info = info
        self._codec = codec
        self._cache = cache
        self._max_waiting = config.max_waiting
        self._intake = Intake(info, codec, config.max_running, clock)
        self._scheduler = Scheduler(
            cache,
            page_size=info.page_size,
            max_batched_tokens=config.max_batched_tokens,
            max_running=config.max_running,
            max_long_prefills=config.max_long_prefills,
            prefix_cache=config.prefix_cache,
            clock=clock,
        )
        self._stepper = Stepper(
            self._scheduler,
            runner,
            Speculator(drafter, config.speculative_tokens),
            codec.vocabulary.bytes_of,
            self._intake,
            clock,
        )
        self._inbox: queue.SimpleQueue[_Submit | _Abort | _Flush | _Stop] = queue.SimpleQueue()
        self._streams: dict[str, EventStream] = {}
        self._lock = threading.Lock()  # guards _streams, _numbers, _not_admitted, _stopped and _broken
        self._numbers = 0
        self._not_admitted: set[str] = set()
        self._stopped = self._broken = False
        self._thread = threading.Thread(target=self._run, name="chatd-engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def codec(self) -> Codec:
        return self._codec

    def check(self, prompt_tokens: int, params: SamplingParams) -> None:
        with self._lock:
            self._check_open()
        self._intake.check(prompt_tokens, params)

    def submit(self, request: GenerateRequest) -> EventStream:
        """See `Engine.submit`. Raises InvalidRequest, RequestTooLong, QueueFull, EngineStopped."""
        request = replace(request, tokens=np.ascontiguousarray(request.tokens, dtype=np.int32))
        self._intake.check_request(request)
        stream = EventStream(asyncio.get_running_loop())
        with self._lock:
            number, self._numbers = self._numbers, self._numbers + request.n
        choices = self._intake.choices(request, number)  # may take a while: not under the lock that every step takes
        with self._lock:
            self._check_open()
            if request.id in self._streams:
                raise InvalidRequest("a request of this id is running already")
            self._streams[request.id] = stream
            self._not_admitted.add(request.id)
            stream.put(Queued(request.id))
            self._inbox.put(_Submit(choices))
        return stream

    def abort(self, request_id: str) -> None:
        self._inbox.put(_Abort(request_id))

    def snapshot(self) -> EngineSnapshot:
        usage = self._cache.usage
        with self._lock:
            waiting = len(self._not_admitted)
        return EngineSnapshot(
            running=self._scheduler.running,
            waiting=waiting,
            pages=PoolPages(usage.free, usage.evictable, usage.locked, usage.private),
            counters={name: int(value) for name, value in asdict(self._cache.stats).items()},
            steps=self._stepper.steps,
            preemptions=self._scheduler.preemptions,
            broken=self._broken,
        )

    async def flush(self) -> bool:
        done: Future[bool] = Future()
        with self._lock:
            self._check_running()
            self._inbox.put(_Flush(done))
        return await asyncio.wrap_future(done)

    async def close(self) -> None:
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._inbox.put(_Stop())
        await asyncio.to_thread(self._thread.join)

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        try:
            while self._read_inbox(wait=not self._stepper.busy):
                self._stepper.step()
                self._deliver()
            self._stepper.fail_all("shutdown", "the server is shutting down")
            self._deliver()
        except Exception:
            log.exception("the engine has ended: restart the server")
            self._break()

    def _break(self) -> None:
        """Nobody waits for an engine that has ended, whatever state it left."""
        with self._lock:
            self._stopped = self._broken = True
            streams, self._streams = self._streams, {}
            self._not_admitted.clear()
        deliver([(stream, Failed(id, "engine_error", "the engine has ended")) for id, stream in streams.items()])
        while not self._inbox.empty():
            message = self._inbox.get_nowait()
            if isinstance(message, _Flush):
                message.done.set_exception(EngineBroken("the engine has ended"))

    def _read_inbox(self, wait: bool) -> bool:
        """Takes in everything that has arrived, waiting for a first message if told to. False: stop."""
        while True:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            match message:
                case _Submit(choices):
                    self._stepper.add(choices)
                case _Abort(request_id):
                    self._stepper.abort(request_id)
                case _Flush(done):
                    done.set_result(self._cache.reset())
                case _Stop():
                    return False

    def _deliver(self) -> None:
        events = self._stepper.take_events()
        if not events:
            return
        batch = []
        with self._lock:
            for event in events:
                batch.append((self._streams[event.request_id], event))
                if isinstance(event, Admitted | Finished | Failed):
                    self._not_admitted.discard(event.request_id)
                if isinstance(event, Finished | Failed):
                    del self._streams[event.request_id]
        deliver(batch)

    def _check_running(self) -> None:
        if self._broken:
            raise EngineBroken("the engine has ended")
        if self._stopped:
            raise EngineStopped("the engine is shutting down")

    def _check_open(self) -> None:
        self._check_running()
        if len(self._not_admitted) >= self._max_waiting:
            raise QueueFull(len(self._not_admitted))
