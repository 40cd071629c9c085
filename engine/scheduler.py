"""Who computes what in the next step. Plain, synchronous, deterministic; knows pages and tokens, no tensors.

    waiting ──admit──> running ──end──> (gone)
       ^                  │
       └────preempt───────┘

A step holds one token of every sequence that decodes, then chunks of prompts, oldest first, up to `max_batched_tokens`.
When the pool runs dry the youngest sequence gives its pages back and is recomputed later: the oldest always advances.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cache import OutOfPages, PrefixCache
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepRow:
    """Compute tokens start .. start + count - 1 of a sequence; when `samples`, its logits give the next token."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == self.sequence.num_tokens


@dataclass(slots=True)
class StepPlan:
    """rows: what to compute. admitted: who entered for the first time. preempted: who lost its pages.
    exhausted: who is alone and cannot grow any more."""

    rows: list[StepRow] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    exhausted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Continuous batching over one prefix cache. `clock` gives seconds and is read once for each admission."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_batched_tokens: int,
        max_running: int,
        prefix_cache: bool,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._max_batched_tokens = max_batched_tokens
        self._max_running = max_running
        self._prefix_cache = prefix_cache
        self._clock = clock
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self.preemptions = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)
        self._sort_waiting()

    def schedule(self) -> StepPlan:
        """Plans the next step and reserves its pages. Call `computed` for the rows once they have run."""
        plan = StepPlan()
        self._grow(plan)
        budget = self._max_batched_tokens
        decoding = [s for s in self._running if s.pending == 1]
        for sequence in decoding:
            plan.rows.append(StepRow(sequence, sequence.computed, 1))
        budget -= len(decoding)
        for sequence in self._running:
            if sequence.pending > 1 and budget > 0:
                budget -= self._chunk(plan, sequence, budget)
        while budget > 0 and self._waiting and len(self._running) < self._max_running:
            if plan.preempted or not self._admit(plan, self._waiting[0]):
                break
            budget -= self._chunk(plan, self._running[-1], budget)
        return plan

    def computed(self, row: StepRow) -> None:
        """The row's tokens have K and V now: full pages join the tree at once, for anybody's next prompt."""
        sequence = row.sequence
        sequence.computed += row.count
        if sequence.lease is not None and self._caches(sequence):
            sequence.lease.commit(sequence.tokens[: sequence.computed])

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Lets `child`, which has the same tokens, run from what `parent` has computed, on the same pages.

        False: it has no pages, and waits like any other sequence; what the parent committed is cached for it.
        """
        if parent.lease is not None and self._caches(parent) and len(self._running) < self._max_running:
            try:
                child.lease = parent.lease.fork()
            except OutOfPages:
                pass
            else:
                child.computed = parent.computed
                child.admitted = self._clock()
                self._running.append(child)
                return True
        self.add(child)
        return False

    def remove(self, sequence: Sequence) -> None:
        """Takes an ended sequence out and gives back its pages; what it committed stays cached."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
        self._release(sequence)

    def _grow(self, plan: StepPlan) -> None:
        """Every sequence that decodes gets room for its next token, the oldest first."""
        for sequence in list(self._running):
            while sequence in self._running and sequence.lease is not None:
                try:
                    sequence.lease.reserve(sequence.num_tokens)
                    break
                except OutOfPages:
                    if len(self._running) == 1:
                        plan.exhausted.append(sequence)
                        self._running.remove(sequence)
                    else:
                        self._preempt(plan, self._running[-1])

    def _admit(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Locks the longest cached prefix and reserves the rest; False, and nothing changed, where there is no room."""
        first_time = sequence.admitted is None
        tokens = sequence.tokens[: sequence.num_tokens]
        limit = sequence.num_tokens - 1 if self._caches(sequence) else 0
        request = sequence.request
        lease = self._cache.acquire(
            tokens, namespace=request.namespace, limit=limit, owner=request.owner, record=first_time
        )
        try:
            # Room for one token of output as well, or the newcomer would be the first to be preempted.
            lease.reserve(min(sequence.num_tokens + 1, sequence.capacity))
        except OutOfPages:
            lease.release()
            return False
        sequence.lease = lease
        sequence.computed = lease.cached_tokens
        if first_time:
            sequence.admitted = self._clock()
            sequence.cached_tokens = lease.cached_tokens
            plan.admitted.append(sequence)
        self._waiting.remove(sequence)
        self._running.append(sequence)
        return True

    def _chunk(self, plan: StepPlan, sequence: Sequence, budget: int) -> int:
        count = min(sequence.pending, budget)
        plan.rows.append(StepRow(sequence, sequence.computed, count))
        return count

    def _preempt(self, plan: StepPlan, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._release(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        plan.preempted.append(sequence)
        self._waiting.append(sequence)
        self._sort_waiting()

    def _release(self, sequence: Sequence) -> None:
        if sequence.lease is not None:
            sequence.lease.release()
            sequence.lease = None

    def _caches(self, sequence: Sequence) -> bool:
        return self._prefix_cache and sequence.request.use_cache

    def _sort_waiting(self) -> None:
        """By priority, then by age: a preempted sequence is older than whatever arrived after it."""
        self._waiting.sort(key=lambda s: (-s.request.priority, s.number))
