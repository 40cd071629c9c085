"""The engine's work, step by step: plan, model, sampling, events. Knows no threads, no event loop and no streams."""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.api import Admitted, Event, Failed, Finished, FinishReason, Progress
from engine.choices import Choices
from engine.errors import DeviceLost
from engine.flight import Flight, Sampling
from engine.intake import Intake
from engine.launched import Outcome
from engine.runner import ModelRunner
from engine.sampling import BAD_LOGITS, Draw, NoCandidate, Sampled, Sampler, Verdict
from engine.scheduler import Scheduler, StepRow
from engine.sequence import Sequence
from engine.speculation import Speculator, verified

log = logging.getLogger(__name__)


class Stepper:
    """Takes requests, gives their events: every one ends with exactly one Finished or Failed. One thread.

    Where the device chooses tokens, a step is planned and launched while the one before it runs:

        host      plan 1  launch 1  plan 2  launch 2  land 1  plan 3  launch 3  land 2 ...
        device            |------- step 1 -------||------- step 2 -------||------- step 3 ...

    What step 1 chooses is `expected` by its sequences until it lands. A sequence that has ended by then, or was
    aborted, is still in step 2, of which it takes nothing; its pages may be given away at once, since whatever others
    do with them comes behind step 2 on the device.

    steps: how many were launched. overlapped: how many of them while another ran. bytes_of: see `Sampler`.
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
        self._flight: Flight | None = None
        self._exhausted: list[Sequence] = []
        self._outbox: list[Event] = []
        self.steps = 0
        self.overlapped = 0

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
        """Lands a step, which is launched first if none is under way; the next one is launched before, if it can be.

        Raises DeviceLost.
        """
        flight, self._flight = self._flight or self._launch(None), None
        if flight is not None:
            if flight.leads and self.busy:
                self._flight = self._launch(flight)
            self._land(flight)
        self._end_exhausted()

    def _launch(self, before: Flight | None) -> Flight | None:
        """The next step, if there is anything to compute. before: the one that has not landed yet."""
        plan = self._scheduler.schedule()
        for sequence in plan.preempted:
            self._forget(sequence)
        for sequence in plan.admitted:
            if sequence.index == 0:
                self._announce(sequence)
        self._exhausted += plan.exhausted
        if not plan.rows:
            return None
        try:
            if before is None:
                self._speculator.extend(plan, self._scheduler)
            draws = [self._draw(row) for row in plan.rows for _ in range(row.sampled)]
            launched = self._runner.launch(plan.rows, draws, None if before is None else before.launched)
            for row in plan.rows:
                self._scheduler.computed(row)
                row.sequence.expected += row.sequence.number in launched.indices
        except DeviceLost:
            raise
        except Exception:
            self._failed(plan.rows)
            return None
        self.steps += 1
        self.overlapped += before is not None
        return Flight(plan.rows, launched, leads=self._runner.chooses and not launched.places.rest)

    def _draw(self, row: StepRow) -> Draw | None:
        """How the device chooses the row's token; None: it cannot."""
        sequence = row.sequence
        if not self._runner.chooses or row.drafts or sequence.length >= sequence.capacity:
            return None
        if self._speculator.drafts or self._requests[sequence.request.id].missing:
            return None
        return sequence.sampling.draw(sequence.expected)

    def _land(self, flight: Flight) -> None:
        """Takes what a step gives, once it is there."""
        try:
            self._take_outcome(flight, flight.launched.wait())
        except DeviceLost:
            raise
        except Exception:
            self._failed(flight.rows)

    def _failed(self, rows: list[StepRow]) -> None:
        """Whatever went wrong belongs to a step's requests; the engine goes on with the others."""
        log.exception("a step failed")
        for row in rows:
            if (choices := self._choices(row.sequence)) is not None:
                self._fail(choices, "engine_error", "the model failed on this request")

    def _take_outcome(self, flight: Flight, outcome: Outcome) -> None:
        sampling: list[Sampling] = []
        first = 0
        for row in flight.rows:
            sequence = row.sequence
            if self._goes_on(sequence) and sequence.number not in flight.wrong:
                if row.samples:
                    sampling.append(Sampling(sequence, first, row.drafts))
                    sampling += [Sampling(forked, first) for forked in self._fork(sequence)]
                elif sequence.generated == 0 and sequence.index == 0:
                    self._report_progress(row)
            first += row.sampled
        self._sample(sampling, flight, outcome)

    def _sample(self, sampling: list[Sampling], flight: Flight, outcome: Outcome) -> None:
        """The next tokens of each sequence, from its places."""
        for entry in sampling:
            if entry.sequence.full:  # max_tokens 0: the prompt was only to be prefilled
                self._finish(entry.sequence, "length")
        going_on = [entry for entry in sampling if self._goes_on(entry.sequence)]
        row_of = {place: row for row, place in enumerate(outcome.rest)}
        rows = [row_of[place] for entry in going_on for place in entry.places if place in row_of]
        logits = outcome.logits
        if rows != list(range(len(logits))):
            logits = logits[rows]
        sampler, first = Sampler(logits, self._bytes_of), 0
        for entry in going_on:
            on_device = entry.first in outcome.chosen
            if self._goes_on(entry.sequence):  # a choice that fails ends the others
                if on_device:
                    self._take_chosen(entry, flight, *outcome.chosen[entry.first])
                else:
                    self._verify(entry, sampler, first)
            first += 0 if on_device else len(entry.places)

    def _take_chosen(self, entry: Sampling, flight: Flight, token: int, verdict: Verdict) -> None:
        """Takes the token that the device has chosen, unless the host has to choose another."""
        sequence, outcome = entry.sequence, Sampled(token)
        sequence.expected -= 1
        if verdict is Verdict.SURE:
            sequence.sampling.advance(token)
            self._take(sequence, outcome)
        elif verdict is Verdict.NOT_FINITE:
            self._take(sequence, BAD_LOGITS)
        else:
            logits = flight.launched.look(entry.first)[None]
            looked = Sampler(logits, self._bytes_of).choose(0, sequence.sampling)
            if looked != outcome:
                self._void(sequence)
            self._take(sequence, looked)

    def _void(self, sequence: Sequence) -> None:
        """What the step behind computes of the sequence goes on from a wrong token."""
        following = self._flight
        if following is not None and sequence.number in following.launched.indices:
            following.wrong.add(sequence.number)
            sequence.expected -= 1
            self._scheduler.void(sequence)

    def _goes_on(self, sequence: Sequence) -> bool:
        return self._choices(sequence) is not None and sequence.output.reason is None

    def _choices(self, sequence: Sequence) -> Choices | None:
        """Those that the sequence is one of; None: its request has ended, and another one may have its id by now."""
        choices = self._requests.get(sequence.request.id)
        return choices if choices is not None and choices.request is sequence.request else None

    def _end_exhausted(self) -> None:
        exhausted, self._exhausted = self._exhausted, []
        for sequence in exhausted:
            if not self._goes_on(sequence):
                continue
            if sequence.admitted is None:
                self._fail(self._requests[sequence.request.id], "no_room", "the cache has no room for background work")
            elif sequence.generated:
                self._finish(sequence, "length")
            else:
                self._finish_all(self._requests[sequence.request.id], "length")

    def _verify(self, entry: Sampling, sampler: Sampler, first: int) -> None:
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
            if not self._goes_on(sequence):
                break
        self._speculator.went(sequence, len(entry.drafts), kept)

    def _announce(self, sequence: Sequence) -> None:
        miss = "" if sequence.lease is None else str(sequence.lease.miss)
        self._outbox.append(Admitted(sequence.request.id, sequence.prompt_tokens, sequence.cached_tokens, miss))

    def _report_progress(self, row: StepRow) -> None:
        sequence = row.sequence
        computed = row.start + row.count
        event = Progress(sequence.request.id, computed, sequence.prompt_tokens, sequence.cached_tokens)
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
