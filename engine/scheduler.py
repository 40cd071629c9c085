"""Who computes what in the next step. Plain, synchronous, deterministic; knows pages and tokens, no tensors.

    waiting ──admit──> running ──end──> (gone)
       ^                  │
       └────preempt───────┘

A step computes at most `max_batched_tokens`: one token of every sequence that decodes, always, then prompts in chunks
(`scheduling.budget`). So between two tokens of a stream there is never more than one step of that many tokens.
`WaitingQueue` says who enters next, and bounds every wait. When the pool runs dry, the last by rank (background first,
then the lowest priority, then the youngest) gives its pages back and is recomputed later: the first always advances.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from cache import PrefixCache
from engine.scheduling.budget import Budget, give_first, give_rest
from engine.scheduling.pages import SequencePages
from engine.scheduling.plan import StepPlan, StepRow
from engine.scheduling.shares import Shares
from engine.scheduling.twins import find_hold
from engine.scheduling.waiting import Waiting, WaitingQueue
from engine.sequence import Sequence

__all__ = ["Scheduler", "StepPlan", "StepRow"]

_CANDIDATES = 8
_ROUNDS = 2
_HOLDS = 4
_QUANTUM_STEPS = 8


class Scheduler:
    """Continuous batching over one prefix cache, whose only user it is. `clock` gives seconds and is read once for each
    admission.

    A prompt is long while it has more than half of `max_batched_tokens` to go. At most `max_long_prefills` of them are
    in prefill at a time; the others wait, and short ones pass them.

    Waiting prompts are looked up when they come, and again when they are among the next few to enter, at most 16 in a
    step: so a step costs O(waiting) small integer work at most, and none of it while nobody could enter.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        page_size: int,
        max_batched_tokens: int,
        max_running: int,
        max_long_prefills: int = 1,
        prefix_cache: bool,
        clock: Callable[[], float],
    ) -> None:
        self._pages = SequencePages(cache, page_size, prefix_cache)
        self._max_batched_tokens = max_batched_tokens
        self._max_running = max_running
        self._max_long_prefills = max_long_prefills
        self._share = max(1, max_batched_tokens // 2)
        self._clock = clock
        self._shares = Shares(_QUANTUM_STEPS * max_batched_tokens)
        self._waiting = WaitingQueue(self._shares, max_batched_tokens)
        self._running: list[Sequence] = []
        self._moved: set[Sequence] = set()
        self._no_room: dict[bool, int] = {}
        self._step = 0
        self.preemptions = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        sequence.arrived = self._step
        self._enqueue(sequence)

    def schedule(self) -> StepPlan:
        """Plans the next step and reserves its pages. Call `computed` for the rows once they are launched.

        Steps run in the order in which they are launched: so pages may be given to others, or joined to the tree, as
        soon as the last step that works on them is.
        """
        self._step += 1
        self._shares.step()
        plan = StepPlan()
        self._grow(plan)
        budget = Budget(self._max_batched_tokens)
        for sequence in self._running:
            if sequence.pending == 1 and not sequence.expects_last:
                budget.give(sequence, 1)
        if len(self._waiting) or len(budget.counts) < len(self._running):  # else everybody decodes
            for background in (False, True):
                give_first(budget, self._prefills(background), self._share)
                if not plan.preempted and not plan.exhausted:
                    self._let_in(plan, budget, background)
                give_rest(budget, self._prefills(background))
        plan.rows = [StepRow.next(sequence, count) for sequence, count in budget.counts.items()]
        plan.spare = budget.left
        self._moved = set(budget.counts)
        return plan

    def reserve_ahead(self, sequence: Sequence, at_most: int) -> int:
        """Reserves pages for up to `at_most` guesses behind the tokens of a sequence that decodes; says for how many.

        Only free pages, and one of them is left for each running sequence: guesses evict nothing and preempt nobody.
        """
        if sequence.lease is None:
            return 0
        room = self._pages.ahead(sequence.lease, sequence.num_tokens, at_most, spared=len(self._running))
        if room:
            self._pages.reserve(sequence.lease, sequence, sequence.num_tokens + room)
        return room

    def computed(self, row: StepRow) -> None:
        """The row's tokens have K and V by the time of the next step: full pages of known ones join the tree at once,
        for anybody's next prompt.

        Its drafts do not count, until they are `accepted`.
        """
        self._computed(row.sequence, row.known, int(row.samples))

    def accepted(self, sequence: Sequence) -> None:
        """One draft more, by now the sequence's last token, is its own: it has K and V, from the step of its row."""
        self._computed(sequence, 1, 1)

    def _computed(self, sequence: Sequence, tokens: int, sampled: int) -> None:
        sequence.computed += tokens
        self._shares.charge(sequence.request.tenant, sequence.request.owner, sampled)
        self._commit(sequence)

    def void(self, sequence: Sequence) -> None:
        """The last token of a launched step was a wrong one: it is to be computed once more."""
        if sequence.lease is not None:
            sequence.computed -= 1

    def _commit(self, sequence: Sequence) -> None:
        if sequence.lease is not None and self._pages.shares(sequence):
            sequence.lease.commit(sequence.tokens[: min(sequence.computed, sequence.num_tokens)])

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Lets `child`, which has the same tokens, run from what `parent` has computed, on the same pages.

        False: it has no pages, and waits like any other sequence; what the parent committed is cached for it.
        """
        if parent.lease is not None and self._pages.shares(parent) and len(self._running) < self._max_running:
            child.lease = self._pages.fork(parent.lease)
        if child.lease is None:
            self.add(child)
            return False
        child.computed, child.admitted = parent.computed, self._clock()
        insort(self._running, child, key=_rank)
        return True

    def remove(self, sequence: Sequence) -> None:
        """Takes an ended sequence out and gives back its pages; what it has computed stays cached."""
        self._commit(sequence)
        self._waiting.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
        self._release(sequence)
        self._no_room.clear()

    def _grow(self, plan: StepPlan) -> None:
        """Every sequence that decodes gets room for its next token, the first by rank first. None whose last token is
        expected: that one is never computed."""
        for sequence in list(self._running):
            while sequence.lease is not None and not sequence.expects_last:
                if self._pages.reserve(sequence.lease, sequence, sequence.length) is None:
                    break
                if len(self._running) > 1:
                    self._preempt(plan, self._running[-1])
                elif not self._unpin(sequence):
                    plan.exhausted.append(sequence)
                    self._running.remove(sequence)
                    break

    def _let_in(self, plan: StepPlan, budget: Budget, background: bool) -> None:
        """Admits those of one class that there are tokens, places and pages for. Background work enters only where
        nothing interactive waits, and gives way to what does."""
        if not self._waiting.count(background) or (background and self._waiting.count(False)):
            return
        if (no_room := self._no_room.get(background)) is not None and self._pages.room(background) <= no_room:
            return
        for _ in range(_ROUNDS):
            if not budget.left or not self._place(background):
                return
            candidates = self._candidates(budget, background)
            stop = not candidates
            for entry in candidates:
                if not budget.left or not self._place(background):
                    return
                if stop := self._try(plan, budget, entry):
                    break
            if stop:
                if self._running and not any(s.pending > 1 for s in self._running):
                    self._no_room[background] = self._pages.room(background)
                return

    def _candidates(self, budget: Budget, background: bool) -> list[Waiting]:
        """The next few that might enter, looked up anew, in order."""
        crowded, room = bool(self._running), self._pages.room(background)
        moving = self._moved | budget.counts.keys()
        long_may_enter = self._long_may_enter(background)

        def may_enter(entry: Waiting) -> bool:
            if entry.hold is not None:
                if entry.hold.lasts(moving):
                    return False
                entry.hold = None
                return True  # whatever was known of it is out of date
            if entry.to_compute > self._share and not long_may_enter:
                return False
            return entry.first or not (crowded and entry.too_large(room, self._step))

        candidates = self._waiting.next(_CANDIDATES, background, may_enter)
        for entry in candidates:
            self._waiting.found(entry, self._pages.match(entry.sequence))
        return sorted(candidates, key=lambda entry: entry.key)

    def _try(self, plan: StepPlan, budget: Budget, entry: Waiting) -> bool:
        """Lets it in if that can be. True where there is no room and its turn has come: nobody may pass it then."""
        sequence = entry.sequence
        if self._hold(entry):
            return False
        if entry.to_compute > self._share and not self._long_may_enter(sequence.background):
            return False
        if self._running and not self._gives_way(sequence):
            room, least = self._pages.room(sequence.background), self._pages.least(sequence, entry.cached)
            if least > room:
                entry.refused(least, self._step)
            if entry.too_large(room, self._step):
                return entry.first
        if not self._admit(plan, budget, entry):
            return entry.first
        budget.give(sequence, sequence.pending)
        return False

    def _admit(self, plan: StepPlan, budget: Budget, entry: Waiting) -> bool:
        """Locks the longest cached prefix and reserves the rest. False where there is no room: then nothing changed,
        but for background work that gave way, and for who could have no room even alone: that one is exhausted."""
        sequence = entry.sequence
        if len(self._running) >= self._max_running:
            self._withdraw(plan, budget)
        lease = self._pages.acquire(sequence)
        while (missing := self._pages.enter(lease, sequence)) is not None:
            if self._gives_way(sequence):
                self._withdraw(plan, budget)
            elif not self._unpin(sequence):
                before = self._pages.room(sequence.background)
                lease.release()
                entry.refused(missing.needed + self._pages.room(sequence.background) - before, self._step)
                if not self._running:
                    self._waiting.remove(sequence)
                    plan.exhausted.append(sequence)
                return False
        sequence.lease = lease
        sequence.computed = lease.cached_tokens
        if sequence.admitted is None:
            sequence.admitted = self._clock()
            sequence.cached_tokens = lease.cached_tokens
            plan.admitted.append(sequence)
            self._shares.charge(sequence.request.tenant, sequence.request.owner, sequence.pending)
        self._waiting.admitted(entry)
        insort(self._running, sequence, key=_rank)
        return True

    def _gives_way(self, sequence: Sequence) -> bool:
        """Whether background work holds places and pages that an interactive newcomer may have."""
        return not sequence.background and bool(self._running) and self._running[-1].background

    def _withdraw(self, plan: StepPlan, budget: Budget) -> None:
        """Takes the last by rank, background work, out of the step that is being planned."""
        budget.take_back(self._running[-1])
        self._preempt(plan, self._running[-1])

    def _preempt(self, plan: StepPlan, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._release(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        plan.preempted.append(sequence)
        self._enqueue(sequence)

    def _unpin(self, sequence: Sequence) -> bool:
        """Pins hold nobody up for ever: they end for an interactive sequence that has the pool to itself otherwise."""
        if sequence.background or self._running not in ([], [sequence]):
            return False
        return self._pages.unpin()

    def _enqueue(self, sequence: Sequence) -> None:
        entry = Waiting(sequence, self._pages.match(sequence))
        self._hold(entry)
        self._waiting.add(entry)
        self._no_room.clear()

    def _hold(self, entry: Waiting) -> bool:
        """Whether it now waits for a prefill that computes a part of its prompt; at most 4 times, should they fail."""
        if not self._pages.shares(entry.sequence) or entry.held_times == _HOLDS:
            return False
        prefills = [other for other in self._running if other.pending > 1]
        entry.hold = find_hold(entry.sequence, entry.cached, prefills, self._pages.page_size)
        entry.held_times += entry.hold is not None
        return entry.hold is not None

    def _prefills(self, background: bool) -> list[Sequence]:
        return [s for s in self._running if s.pending > 1 and s.background == background]

    def _long_may_enter(self, background: bool) -> bool:
        """Interactive prompts do not wait for long ones of the background."""
        long = sum(s.pending > self._share and s.background <= background for s in self._running)
        return long < self._max_long_prefills

    def _place(self, background: bool) -> bool:
        return len(self._running) < self._max_running or (not background and self._running[-1].background)

    def _release(self, sequence: Sequence) -> None:
        if sequence.lease is not None:
            sequence.lease.release()
            sequence.lease = None


def _rank(sequence: Sequence) -> tuple[int, int]:
    return -sequence.request.priority, sequence.number
