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
import torch

from cache import PrefixCache
from engine.api import (
    Admitted,
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
from engine.choices import Choices, choice_params
from engine.config import EngineConfig
from engine.errors import EngineStopped, InvalidRequest, QueueFull, RequestTooLong
from engine.output import ChoiceOutput
from engine.runner import ModelRunner
from engine.sampling import GrammarCompiler, NoCandidate, Sampled, Sampler, SamplerStep, SamplingState, TokenMatcher
from engine.scheduler import Scheduler, StepPlan, StepRow
from engine.sequence import Sequence
from engine.speculation import Drafter, Speculator, verified
from engine.streams import EventStream, deliver
from engine.text import Codec, StopStrings

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


@dataclass(frozen=True, slots=True)
class _Sampling:
    """A sequence that samples in this step: its first place in the logits, and the drafts behind it."""

    sequence: Sequence
    first: int
    drafts: tuple[int, ...] = ()

    @property
    def places(self) -> range:
        return range(self.first, self.first + 1 + len(self.drafts))


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
        self._runner = runner
        self._cache = cache
        self._sampler = Sampler(codec.vocabulary.bytes_of)
        self._speculator = Speculator(drafter, config.speculative_tokens)
        self._grammars = GrammarCompiler(codec.vocabulary, codec.eos_ids, lambda text: codec.encode(text).tolist())
        self._clock = clock
        self._max_waiting = config.max_waiting
        self._max_choices = config.max_running
        self._scheduler = Scheduler(
            cache,
            page_size=info.page_size,
            max_batched_tokens=config.max_batched_tokens,
            max_running=config.max_running,
            max_long_prefills=config.max_long_prefills,
            prefix_cache=config.prefix_cache,
            clock=clock,
        )
        self._inbox: queue.SimpleQueue[_Submit | _Abort | _Flush | _Stop] = queue.SimpleQueue()
        self._streams: dict[str, EventStream] = {}
        self._requests: dict[str, Choices] = {}
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
        if request.adapter is not None and request.adapter not in self._info.adapters:
            raise InvalidRequest("the request names an adapter that is not loaded")
        if "\0" in request.namespace:
            raise InvalidRequest("a namespace must not contain U+0000")
        if not 1 <= request.n <= self._max_choices:
            raise InvalidRequest(f"n must be between 1 and {self._max_choices}")
        self.check(len(tokens), request.params)
        stream = EventStream(asyncio.get_running_loop())
        stops = StopStrings(request.params.stop)
        with self._lock:
            self._check_open()
            if request.id in self._streams:
                raise InvalidRequest("a request of this id is running already")
            first = self._sequence(self._numbers, request, 0, stops)
            self._numbers += request.n
            self._streams[request.id] = stream
            self._not_admitted.add(request.id)
            stream.put(Queued(request.id))
            self._inbox.put(_Submit(Choices(request, stops, [first])))
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
        for choices in list(self._requests.values()):
            self._fail(choices, "shutdown", "the server is shutting down")
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
                case _Submit(choices):
                    self._requests[choices.request.id] = choices
                    self._scheduler.add(choices.first)
                case _Abort(request_id):
                    if (found := self._requests.get(request_id)) is not None:
                        self._finish_all(found, "cancelled")
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
            for request_id in dict.fromkeys(row.sequence.request.id for row in plan.rows):
                if (choices := self._requests.get(request_id)) is not None:
                    self._fail(choices, "engine_error", "the model failed on this request")

    def _compute(self, plan: StepPlan) -> None:
        for sequence in plan.preempted:
            self._forget(sequence)
        for sequence in plan.exhausted:
            if sequence.admitted is None:
                self._fail(self._requests[sequence.request.id], "no_room", "the cache has no room for background work")
            elif sequence.generated:
                self._finish(sequence, "length")
            else:
                self._finish_all(self._requests[sequence.request.id], "length")
        for sequence in plan.admitted:
            if sequence.index == 0:
                self._announce(sequence)
        if not plan.rows:
            return
        self._speculator.extend(plan, self._scheduler)
        logits = self._runner.run(plan.rows)
        self._steps += 1
        sampling: list[_Sampling] = []
        first = 0
        for row in plan.rows:
            self._scheduler.computed(row)
            if row.samples:
                sampling.append(_Sampling(row.sequence, first, row.drafts))
                sampling += [_Sampling(sequence, first) for sequence in self._fork(row.sequence)]
            elif row.sequence.generated == 0 and row.sequence.index == 0:
                self._report_progress(row)
            first += row.sampled
        self._sample(sampling, logits)

    def _sample(self, sampling: list[_Sampling], logits: torch.Tensor) -> None:
        """The next tokens of each sequence, from its places in logits [S, vocab]."""
        for entry in sampling:
            if entry.sequence.full:  # max_tokens 0: the prompt was only to be prefilled
                self._finish(entry.sequence, "length")
        going_on = [entry for entry in sampling if not entry.sequence.full]
        places = [place for entry in going_on for place in entry.places]
        if places != list(range(len(logits))):
            logits = logits[places]
        step, first = self._sampler.open(logits), 0
        for entry in going_on:
            if entry.sequence.request.id in self._requests:  # a choice that fails ends the others
                self._verify(entry, step, first)
            first += len(entry.places)

    def _verify(self, entry: _Sampling, step: SamplerStep, first: int) -> None:
        """Takes a token, and more where drafts are kept, from the rows of `step` that begin at `first`."""
        sequence, kept = entry.sequence, 0
        sequence.drafted += len(entry.drafts)
        for outcome, is_draft in verified(entry.drafts, lambda place: step.choose(first + place, sequence.sampling)):
            if kept:
                self._scheduler.accepted(sequence)
            kept += is_draft
            sequence.accepted += is_draft
            self._take(sequence, outcome)
            if sequence.output.reason is not None or sequence.request.id not in self._requests:
                break
        self._speculator.went(sequence, len(entry.drafts), kept)

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

    def _fork(self, first: Sequence) -> list[Sequence]:
        """Makes the other choices at the end of a prompt; gives those that have pages, the rest wait."""
        choices, forked = self._requests[first.request.id], []
        for index in choices.missing:
            sequence = self._sequence(first.number, choices.request, index, choices.stops)
            choices.sequences.append(sequence)
            if self._scheduler.fork(first, sequence):
                self._runner.fork(first, sequence)
                forked.append(sequence)
        return forked

    def _take(self, sequence: Sequence, outcome: Sampled | NoCandidate) -> None:
        if isinstance(outcome, NoCandidate):
            self._fail(self._requests[sequence.request.id], outcome.code, outcome.reason)
            return
        token = outcome.token
        sequence.append(token, self._clock())
        delta = sequence.output.push(token, outcome.logprob, last=sequence.full)
        if delta is not None:
            self._outbox.append(delta)
        if sequence.output.reason is not None:
            self._ended(sequence)
        elif sequence.sampling.ended:
            self._finish(sequence, "stop")

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._outbox.append(sequence.output.end(reason))
        self._ended(sequence)

    def _ended(self, sequence: Sequence) -> None:
        """The choice has given its last delta; with the last choice the request ends."""
        self._drop(sequence)
        choices = self._requests[sequence.request.id]
        if (reason := choices.reason) is not None:
            self._end(choices, reason)

    def _finish_all(self, choices: Choices, reason: FinishReason) -> None:
        """Ends every choice at once; those that have sampled anything tell it."""
        for sequence in choices.unended:
            if sequence.generated:
                self._outbox.append(sequence.output.end(reason))
        self._end(choices, reason)

    def _fail(self, choices: Choices, code: str, message: str) -> None:
        self._close(choices, Failed(choices.request.id, code, message))

    def _end(self, choices: Choices, reason: FinishReason) -> None:
        end = Finished(choices.request.id, reason, choices.usage(), choices.timings(self._clock()))
        self._close(choices, end)

    def _close(self, choices: Choices, event: Finished | Failed) -> None:
        for sequence in choices.sequences:
            self._drop(sequence)
        del self._requests[choices.request.id]
        with self._lock:
            self._not_admitted.discard(choices.request.id)
        self._outbox.append(event)

    def _drop(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._runner.drop(sequence.number)
        self._speculator.drop(sequence.number)

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

    def _sequence(self, first: int, request: GenerateRequest, index: int, stops: StopStrings) -> Sequence:
        """Choice `index` of a request whose first sequence has the number `first`."""
        limit = min(self._info.context_length, self._info.pool_tokens)
        params, asked = request.params, request.params.max_tokens
        return Sequence(
            number=first + index,
            index=index,
            request=request,
            sampling=SamplingState(
                choice_params(params, index), self._codec.eos_ids, request.tokens, self._matcher(params.grammar)
            ),
            output=ChoiceOutput(request, index, self._codec.detokenizer(), self._codec.eos_ids, stops),
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
