"""The engine in this process: one thread that owns torch, an inbox, and one hop to the event loop for each step."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import asdict, dataclass

import numpy as np

from cache import PrefixCache
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
    Grammar,
    PoolPages,
    Progress,
    Queued,
    SamplingParams,
)
from engine.config import EngineConfig
from engine.errors import EngineStopped, InvalidRequest, QueueFull, RequestTooLong
from engine.runner import ModelRunner
from engine.sampling import GrammarCompiler, NoCandidate, Sampled, Sampler, SamplingState, TokenMatcher
from engine.scheduler import Scheduler, StepPlan, StepRow
from engine.sequence import Sequence
from engine.streams import EventStream, deliver
from engine.text import Codec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Submit:
    sequence: Sequence


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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._info = info
        self._codec = codec
        self._runner = runner
        self._cache = cache
        self._sampler = Sampler(codec.vocabulary.bytes_of)
        self._grammars = GrammarCompiler(codec.vocabulary, codec.eos_ids, lambda text: codec.encode(text).tolist())
        self._clock = clock
        self._max_waiting = config.max_waiting
        self._scheduler = Scheduler(
            cache,
            max_batched_tokens=config.max_batched_tokens,
            max_running=config.max_running,
            prefix_cache=config.prefix_cache,
            clock=clock,
        )
        self._inbox: queue.SimpleQueue[_Submit | _Abort | _Flush | _Stop] = queue.SimpleQueue()
        self._streams: dict[str, EventStream] = {}
        self._sequences: dict[str, Sequence] = {}
        self._outbox: list[Event] = []
        self._lock = threading.Lock()  # guards _streams, _numbers, _not_admitted and _stopped
        self._numbers = 0
        self._not_admitted: set[str] = set()
        self._stopped = False
        self._steps = 0
        self._thread = threading.Thread(target=self._run, name="chatd-engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def codec(self) -> Codec:
        return self._codec

    def check(self, prompt_tokens: int, params: SamplingParams) -> None:
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", (token for token, _ in params.logit_bias))
        context, pool = self._info.context_length, self._info.pool_tokens
        asked = 1 if params.max_tokens is None else params.max_tokens
        if prompt_tokens + asked > context:
            raise RequestTooLong(prompt_tokens, params.max_tokens, context, "context")
        if prompt_tokens + min(asked, 1) > pool:
            raise RequestTooLong(prompt_tokens, params.max_tokens, pool, "KV pool")
        with self._lock:
            self._check_open()
        self._matcher(params.grammar)

    def submit(self, request: GenerateRequest) -> EventStream:
        """See `Engine.submit`. Raises InvalidRequest, RequestTooLong, QueueFull, EngineStopped."""
        tokens = np.ascontiguousarray(request.tokens, dtype=np.int32)
        if tokens.ndim != 1 or len(tokens) == 0:
            raise InvalidRequest("a prompt is a one-dimensional array of at least one token id")
        self._check_ids("prompt", (int(tokens.min()), int(tokens.max())))
        self.check(len(tokens), request.params)
        matcher = self._matcher(request.params.grammar)
        sampling = SamplingState(request.params, self._codec.eos_ids, tokens, matcher)
        stream = EventStream(asyncio.get_running_loop())
        with self._lock:
            self._check_open()
            if request.id in self._streams:
                raise InvalidRequest("a request of this id is running already")
            self._numbers += 1
            self._streams[request.id] = stream
            self._not_admitted.add(request.id)
            stream.put(Queued(request.id))
            self._inbox.put(_Submit(self._sequence(self._numbers, request, sampling)))
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
            steps=self._steps,
            preemptions=self._scheduler.preemptions,
        )

    async def flush(self) -> bool:
        done: Future[bool] = Future()
        with self._lock:
            if self._stopped:
                raise EngineStopped("the engine has ended")
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
        while True:
            busy = bool(self._scheduler.running or self._scheduler.waiting)
            if not self._read_inbox(wait=not busy):
                break
            self._step()
            self._deliver()
        for sequence in list(self._sequences.values()):
            self._fail(sequence, "shutdown", "the server is shutting down")
        self._deliver()

    def _read_inbox(self, wait: bool) -> bool:
        """Takes in everything that has arrived, waiting for a first message if told to. False: stop."""
        while True:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            match message:
                case _Submit(sequence):
                    self._sequences[sequence.request.id] = sequence
                    self._scheduler.add(sequence)
                case _Abort(request_id):
                    if (found := self._sequences.get(request_id)) is not None:
                        self._finish(found, "cancelled")
                case _Flush(done):
                    done.set_result(self._cache.reset())
                case _Stop():
                    return False

    def _step(self) -> None:
        plan = self._scheduler.schedule()
        try:
            self._compute(plan)
        except Exception:
            # Whatever went wrong belongs to this step's requests; the engine goes on with the others.
            log.exception("a step failed")
            for sequence in {row.sequence.number: row.sequence for row in plan.rows}.values():
                if sequence.request.id in self._sequences:
                    self._fail(sequence, "engine_error", "the model failed on this request")

    def _compute(self, plan: StepPlan) -> None:
        for sequence in plan.preempted:
            self._runner.drop(sequence.number)
        for sequence in plan.exhausted:
            self._finish(sequence, "length")
        for sequence in plan.admitted:
            self._announce(sequence)
        if not plan.rows:
            return
        logits = self._runner.run(plan.rows)
        self._steps += 1
        for row in plan.rows:
            self._scheduler.computed(row)
            if not row.samples and row.sequence.generated == 0:
                self._report_progress(row)
        sampling = [row.sequence for row in plan.rows if row.samples]
        outcomes = self._sampler.sample(logits, [sequence.sampling for sequence in sampling])
        for sequence, outcome in zip(sampling, outcomes, strict=True):
            self._take(sequence, outcome)

    def _announce(self, sequence: Sequence) -> None:
        with self._lock:
            self._not_admitted.discard(sequence.request.id)
        lease = sequence.lease
        miss = "" if lease is None or lease.miss is None else str(lease.miss)
        self._outbox.append(Admitted(sequence.request.id, sequence.prompt_tokens, sequence.cached_tokens, miss))

    def _report_progress(self, row: StepRow) -> None:
        sequence = row.sequence
        event = Progress(sequence.request.id, sequence.computed, sequence.prompt_tokens, sequence.cached_tokens)
        self._outbox.append(event)

    def _take(self, sequence: Sequence, outcome: Sampled | NoCandidate) -> None:
        if sequence.full:  # max_tokens 0: the prompt was only to be prefilled
            self._finish(sequence, "length")
            return
        if isinstance(outcome, NoCandidate):
            self._fail(sequence, "no_candidate", outcome.reason)
            return
        token = outcome.token
        sequence.append(token, self._clock())
        text = sequence.detokenizer.push((token,))
        sequence.unsent.append(token)
        if outcome.logprob is not None:
            sequence.unsent_logprobs.append(outcome.logprob)
        reason = sequence.end_reason(token, self._codec.eos_ids)
        if reason == "stop":
            # The stop id has no text of its own; bytes of a character that will never be whole go, with their ids.
            kept = len(sequence.unsent) - 1 - sequence.detokenizer.pending_ids
            ids = (*sequence.unsent[:kept], token)
            logprobs = (*sequence.unsent_logprobs[:kept], *sequence.unsent_logprobs[-1:])
            self._outbox.append(Delta(sequence.request.id, ids, text, logprobs=logprobs))
        elif sequence.detokenizer.pending_ids == 0:
            ids, logprobs = tuple(sequence.unsent), tuple(sequence.unsent_logprobs)
            self._outbox.append(Delta(sequence.request.id, ids, text, logprobs=logprobs))
            sequence.unsent.clear()
            sequence.unsent_logprobs.clear()
        if reason is not None:
            self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        now = self._clock()
        self._end(sequence, Finished(sequence.request.id, reason, sequence.usage(), sequence.timings(now)))

    def _fail(self, sequence: Sequence, code: str, message: str) -> None:
        self._end(sequence, Failed(sequence.request.id, code, message))

    def _end(self, sequence: Sequence, event: Finished | Failed) -> None:
        self._scheduler.remove(sequence)
        self._runner.drop(sequence.number)
        del self._sequences[sequence.request.id]
        with self._lock:
            self._not_admitted.discard(sequence.request.id)
        self._outbox.append(event)

    def _deliver(self) -> None:
        if not self._outbox:
            return
        batch = []
        with self._lock:
            for event in self._outbox:
                batch.append((self._streams[event.request_id], event))
                if isinstance(event, Finished | Failed):
                    del self._streams[event.request_id]
        self._outbox.clear()
        deliver(batch)

    def _check_open(self) -> None:
        if self._stopped:
            raise EngineStopped("the engine is shutting down")
        if len(self._not_admitted) >= self._max_waiting:
            raise QueueFull(len(self._not_admitted))

    def _sequence(self, number: int, request: GenerateRequest, sampling: SamplingState) -> Sequence:
        limit = min(self._info.context_length, self._info.pool_tokens)
        asked = request.params.max_tokens
        return Sequence(
            number=number,
            request=request,
            sampling=sampling,
            detokenizer=self._codec.detokenizer(),
            capacity=limit if asked is None else min(limit, len(request.tokens) + asked),
            received=self._clock(),
        )

    def _matcher(self, grammar: Grammar | None) -> TokenMatcher | None:
        """Raises InvalidRequest."""
        return None if grammar is None else self._grammars.matcher(grammar)

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        size = self._codec.vocab_size
        if not all(0 <= token < size for token in ids):
            raise InvalidRequest(f"{name} has ids outside the vocabulary of {size}")
