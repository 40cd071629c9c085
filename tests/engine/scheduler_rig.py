"""A scheduler over a real prefix cache, driven by hand; its model only remembers what was computed where."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from cache import PagePool, PrefixCache
from cache.tokens import PageIds
from engine.api import GenerateRequest, SamplingParams, TokenIds
from engine.scheduler import Scheduler, StepPlan, StepRow
from engine.sequence import Sequence

MAX_STEPS = 100_000


class RecordingModel:
    """The KV pool holds, at each slot, a fingerprint of the tokens up to it; a row must find its past as it left it."""

    def __init__(self, num_pages: int, page_size: int, context: int) -> None:
        self._page_size = page_size
        self._kv = np.zeros(num_pages * page_size, np.uint64)
        self._weights = np.random.default_rng(0).integers(1, 2**63, context, dtype=np.uint64) * np.uint64(2)
        self.tokens = 0

    def run(self, row: StepRow, pages: PageIds) -> None:
        """pages: those that the sequence had when the row was launched."""
        sequence, end = row.sequence, row.start + row.count
        assert len(pages) * self._page_size >= end
        prints = np.cumsum((sequence.tokens[:end].astype(np.uint64) + np.uint64(1)) * self._weights[:end])
        positions = np.arange(end)
        slots = pages[positions // self._page_size] * self._page_size + positions % self._page_size
        assert (self._kv[slots[: row.start]] == prints[: row.start]).all(), "a sequence lost its past"
        self._kv[slots[row.start :]] = prints[row.start :]
        self.tokens += row.count


@dataclass
class Flight:
    """A launched step, with the page tables of its rows. leads: another may be launched before it lands."""

    rows: list[tuple[StepRow, PageIds]]
    leads: bool
    wrong: set[int] = field(default_factory=set)


@dataclass
class Rig:
    """Adds requests and runs steps; every step is checked against the rules that always hold.

    ahead: steps are planned and launched while the one before runs, as on a device of its own; then, now and then, a
    token is not the one that the step behind has gone on from.
    """

    pages: int = 64
    page_size: int = 4
    budget: int = 32
    max_running: int = 8
    max_long_prefills: int = 1
    context: int = 4096
    prefix_cache: bool = True
    ahead: bool = False
    steps: int = 0
    ended: dict[int, str] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    live: dict[int, Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = PrefixCache(PagePool(self.pages, self.page_size))
        self.model = RecordingModel(self.pages, self.page_size, self.context)
        self.scheduler = Scheduler(
            self.cache,
            page_size=self.page_size,
            max_batched_tokens=self.budget,
            max_running=self.max_running,
            max_long_prefills=self.max_long_prefills,
            prefix_cache=self.prefix_cache,
            clock=lambda: float(self.steps),
        )
        self._numbers = 0
        self._flight: Flight | None = None
        self._exhausted: list[Sequence] = []

    def add(self, prompt: int | TokenIds, max_tokens: int | None = 1, **request: Any) -> Sequence:
        """A prompt, or the length of one that shares nothing with any other."""
        self._numbers += 1
        number, limit = self._numbers, min(self.context, self.pages * self.page_size)
        if isinstance(prompt, int):
            prompt = np.random.default_rng(number).integers(1000, 2**31, prompt).astype(np.int32)
        params = SamplingParams(max_tokens=max_tokens)
        sequence = Sequence(
            number=number,
            index=0,
            request=GenerateRequest(str(number), prompt, params, **request),
            sampling=cast(Any, None),
            output=cast(Any, None),
            capacity=limit if max_tokens is None else min(limit, len(prompt) + max_tokens),
            received=0.0,
        )
        self.live[number] = sequence
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        """Gives the plan of the step that was launched last."""
        plan = StepPlan()
        flight, self._flight = self._flight, None
        if flight is None:
            flight, plan = self._launch()
        if self.ahead and flight is not None and flight.leads and self.live:
            self._flight, plan = self._launch()
        if flight is not None:
            self._land(flight)
        exhausted, self._exhausted = self._exhausted, []
        for sequence in exhausted:
            if sequence.number in self.live:
                self._end(sequence, "length" if sequence.admitted is not None else "no_room")
        return plan

    def _launch(self) -> tuple[Flight | None, StepPlan]:
        scheduler = self.scheduler
        decoding = [s for s in scheduler._running if s.pending == 1 and not s.expects_last]
        plan = scheduler.schedule()
        self.steps += 1
        self._check(plan, decoding)
        self.order += [s.number for s in plan.admitted]
        self._exhausted += plan.exhausted
        if not plan.rows:
            return None, plan
        rows = [(row, row.sequence.lease.pages.copy()) for row in plan.rows if row.sequence.lease is not None]
        assert len(rows) == len(plan.rows)
        goes_on = [row.sequence for row in plan.rows if row.samples and row.sequence.length < row.sequence.capacity]
        for row in plan.rows:
            scheduler.computed(row)
        for sequence in goes_on:
            sequence.expected += 1
        return Flight(rows, len(goes_on) == sum(row.samples for row in plan.rows)), plan

    def _land(self, flight: Flight) -> None:
        """Steps are computed in the order in which they were launched, whatever was planned since."""
        for row, pages in flight.rows:
            self.model.run(row, pages)
        for row, _ in flight.rows:
            sequence = row.sequence
            if not row.samples or sequence.number not in self.live or sequence.number in flight.wrong:
                continue
            following = self._flight
            if following is not None and self.steps % 7 == 0 and any(r.sequence is sequence for r, _ in following.rows):
                following.wrong.add(sequence.number)
                sequence.expected -= 1
                self.scheduler.void(sequence)
            sequence.expected -= not sequence.full
            self._sample(sequence)

    def run(self, max_steps: int = MAX_STEPS) -> None:
        """Until nothing is left to do; then every page must be back."""
        for _ in range(max_steps):
            if not self.live:
                break
            self.step()
        if self._flight is not None:
            self._land(self._flight)
        assert not self.live
        assert scheduler_is_idle(self.scheduler)
        self.cache.check()
        usage = self.cache.usage
        assert usage.free + usage.evictable == self.pages

    def abort(self, sequence: Sequence) -> None:
        self._end(sequence, "cancelled")

    def _sample(self, sequence: Sequence) -> None:
        if not sequence.full:
            token = int(sequence.tokens[: sequence.num_tokens].sum() % 997)
            sequence.append(token, float(self.steps))
        if sequence.full:
            self._end(sequence, "length")

    def _end(self, sequence: Sequence, reason: str) -> None:
        self.scheduler.remove(sequence)
        self.ended[sequence.number] = reason
        del self.live[sequence.number]

    def _check(self, plan: StepPlan, decoding: list[Sequence]) -> None:
        rows = {row.sequence.number: row for row in plan.rows}
        running = self.scheduler._running
        assert sum(row.count for row in plan.rows) <= self.budget
        assert len(rows) == len(plan.rows)
        assert len(running) <= self.max_running
        assert all(row.start == row.sequence.computed and row.count > 0 for row in plan.rows)
        for sequence in decoding:
            assert sequence.number in rows or sequence in plan.preempted or sequence in plan.exhausted
        if running and not running[0].expects_last:
            assert running[0].number in rows, "the first by rank did not advance"
        moving = plan.rows or plan.exhausted or plan.preempted or any(s.expected for s in self.live.values())
        assert moving or not self.live, "nothing moved"
        if any(not s.background for s in plan.preempted) or any(s.admitted is not None for s in plan.exhausted):
            assert not plan.admitted, "somebody entered while room was short"
        for sequence in self.live.values():
            holds = sequence in running or sequence in plan.exhausted
            assert (sequence.lease is not None) <= holds, "a waiting request holds pages"


def scheduler_is_idle(scheduler: Scheduler) -> bool:
    return scheduler.running == 0 and scheduler.waiting == 0


def counts(plan: StepPlan) -> dict[int, int]:
    return {row.sequence.number: row.count for row in plan.rows}


def ids(length: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + length, dtype=np.int32)


def decoding(rig: Rig, length: int = 4, max_tokens: int | None = 200, **request: Any) -> Sequence:
    """A request that has had its first token."""
    sequence = rig.add(length, max_tokens, **request)
    while sequence.generated == 0:
        rig.step()
    return sequence
