"""The engine's work, step by step: plan, model, sampling, events. Knows no threads, no event loop and no streams."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.api import Admitted, Event, Failed, Finished, FinishReason, Progress
from engine.choices import Choices
from engine.intake import Intake
from engine.runner import ModelRunner
from engine.sampling import NoCandidate, Sampled, Sampler
from engine.scheduler import Scheduler, StepPlan, StepRow
from engine.sequence import Sequence
from engine.speculation import Speculator, verified

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Sampling:
    """A sequence that samples in this step: its first place in the logits, and the drafts behind it."""

    sequence: Sequence
    first: int
    drafts: tuple[int, ...] = ()

    @property
    def places(self) -> range:
        return range(self.first, self.first + 1 + len(self.drafts))


class Stepper:
    """Takes requests, gives their events: every one ends with exactly one Finished or Failed. One thread.

    steps: how many have been computed. bytes_of: see `Sampler`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        speculator: Speculator,
        bytes_of: Callable[[int], bytes],
        intake: Intake,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._speculator = speculator
        self._bytes_of = bytes_of
        self._intake = intake
        self._clock = clock
        self._requests: dict[str, Choices] = {}
        self._outbox: list[Event] = []
        self.steps = 0

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def add(self, choices: Choices) -> None:
        self._requests[choices.request.id] = choices
        self._scheduler.add(choices.first)

    def abort(self, request_id: str) -> None:
        if (choices := self._requests.get(request_id)) is not None:
            self._finish_all(choices, "cancelled")

    def fail_all(self, code: str, message: str) -> None:
        for choices in list(self._requests.values()):
            self._fail(choices, code, message)

    def take_events(self) -> list[Event]:
        """What has happened since the last call, in order."""
        events, self._outbox = self._outbox, []
        return events

    def step(self) -> None:
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
        self.steps += 1
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
        if len(places) != logits.shape[0] or places != list(range(len(places))):
            logits = logits[places]
        sampler, first = Sampler(logits, self._bytes_of), 0
        for entry in going_on:
            if entry.sequence.request.id in self._requests:  # a choice that fails ends the others
                self._verify(entry, sampler, first)
            first += len(entry.places)

    def _verify(self, entry: _Sampling, sampler: Sampler, first: int) -> None:
        """Takes a token, and more where drafts are kept, from the rows of `sampler` that begin at `first`."""
        sequence, kept = entry.sequence, 0
        if not entry.drafts:
            self._take(sequence, sampler.choose(first, sequence.sampling))
            return
        sequence.drafted += len(entry.drafts)
        for outcome, is_draft in verified(entry.drafts, lambda place: sampler.choose(first + place, sequence.sampling)):
            if kept:
                self._scheduler.accepted(sequence)
            kept += is_draft
            sequence.accepted += is_draft
            self._take(sequence, outcome)
            if sequence.output.reason is not None or sequence.request.id not in self._requests:
                break
        self._speculator.went(sequence, len(entry.drafts), kept)

    def _announce(self, sequence: Sequence) -> None:
        miss = "" if sequence.lease is None else str(sequence.lease.miss)
        self._outbox.append(Admitted(sequence.request.id, sequence.prompt_tokens, sequence.cached_tokens, miss))

    def _report_progress(self, row: StepRow) -> None:
        sequence = row.sequence
        event = Progress(sequence.request.id, sequence.computed, sequence.prompt_tokens, sequence.cached_tokens)
        self._outbox.append(event)

    def _fork(self, first: Sequence) -> list[Sequence]:
        """Makes the other choices at the end of a prompt; gives those that have pages, the rest wait."""
        choices, forked = self._requests[first.request.id], []
        while choices.missing:
            sequence = self._intake.another(choices)
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
        self._outbox.append(event)

    def _drop(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._runner.drop(sequence.number)
        self._speculator.drop(sequence.number)
