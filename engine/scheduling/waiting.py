"""Who waits, and in which order they are let in."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from engine.scheduling.shares import Shares
from engine.scheduling.twins import Hold
from engine.sequence import Sequence

OVERTAKEN = 64
PASSED = 16
KNOWN_FOR = 32

Key = tuple[int, int, int, int, int]


@dataclass(slots=True, eq=False)
class Waiting:
    """A request in the queue. cached: what the last look-up found. needs: pages that had to be free or evictable for it
    when it was refused, in step `refused_in`; else 0. overtaken: later requests of its priority that have entered
    before it; passed: those of them that entered since there was no room for it. held_times: how often it has waited
    for a twin. `key` places it in the queue."""

    sequence: Sequence
    cached: int
    needs: int = 0
    refused_in: int = 0
    overtaken: int = 0
    passed: int = 0
    hold: Hold | None = None
    held_times: int = 0
    key: Key = (0, 0, 0, 0, 0)

    @property
    def first(self) -> bool:
        """Its turn has come: it goes before others of its priority, and where there is no room for it, they wait."""
        return self.overtaken >= OVERTAKEN or self.passed >= PASSED or self.sequence.preemptions > 0

    @property
    def to_compute(self) -> int:
        return self.sequence.num_tokens - self.cached

    def refused(self, needs: int, step: int) -> None:
        self.needs, self.refused_in = needs, step

    def too_large(self, room: int, step: int) -> bool:
        """For so few pages; what it needs is asked anew after 32 steps, since others may have locked what it shares."""
        return self.needs > room and step - self.refused_in < KNOWN_FOR


class WaitingQueue:
    """The order, lowest key first:

    1. Higher priority; so interactive work (0 and above) before background work (below 0).
    2. Those whose turn has come, by age: who was preempted, has been overtaken by 64 later requests of its priority, or
       refused for want of room while 16 of them got in. This bounds every wait, whatever the next rules say.
    3. The tenant that was served least lately, then the owner (session) within it: `Shares`, in whole quanta.
    4. Who would be through first, alone from its arrival on: arrival in steps times the tokens of a step, plus the
       tokens that are not cached. So the longest cached prefix goes first, and loses a step's tokens with each step of
       lateness: among equals, one is overtaken only by who came within the time that its own prompt takes.
    5. Age.
    """

    def __init__(self, shares: Shares, step_tokens: int) -> None:
        self._shares = shares
        self._version = shares.version
        self._step_tokens = step_tokens
        self._entries: dict[int, Waiting] = {}
        self._ordered: dict[bool, list[Waiting]] = {False: [], True: []}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._entries.values())

    def count(self, background: bool) -> int:
        return len(self._ordered[background])

    def add(self, entry: Waiting) -> None:
        self._entries[entry.sequence.number] = entry
        self._insert(entry)

    def remove(self, sequence: Sequence) -> None:
        """Does nothing where it does not wait."""
        entry = self._entries.pop(sequence.number, None)
        if entry is not None:
            self._extract(entry)

    def found(self, entry: Waiting, cached: int) -> None:
        """A new look-up has found so many tokens."""
        if cached != entry.cached:
            self._extract(entry)
            entry.cached, entry.needs = cached, 0
            self._insert(entry)

    def admitted(self, entry: Waiting) -> None:
        """Takes it out, and remembers it for those that came before and wait on."""
        sequence = entry.sequence
        self.remove(sequence)
        priority, number = sequence.request.priority, sequence.number
        for other in list(self._ordered[sequence.background]):
            if other.sequence.number < number and other.hold is None and other.sequence.request.priority == priority:
                was_first = other.first
                other.overtaken += 1
                other.passed += other.needs > 0
                if other.first and not was_first:
                    self._extract(other)
                    self._insert(other)

    def next(self, count: int, background: bool, may_enter: Callable[[Waiting], bool]) -> list[Waiting]:
        """The first `count` of one class among those that may enter."""
        if self._version != self._shares.version:
            self._version = self._shares.version
            for ordered in self._ordered.values():
                for entry in ordered:
                    entry.key = self._key(entry)
                ordered.sort(key=_key_of)
        return list(islice(filter(may_enter, self._ordered[background]), count))

    def _insert(self, entry: Waiting) -> None:
        entry.key = self._key(entry)
        insort(self._ordered[entry.sequence.background], entry, key=_key_of)

    def _extract(self, entry: Waiting) -> None:
        ordered = self._ordered[entry.sequence.background]
        del ordered[bisect_left(ordered, entry.key, key=_key_of)]

    def _key(self, entry: Waiting) -> Key:
        sequence = entry.sequence
        request = sequence.request
        if entry.first:
            return -request.priority, -1, 0, 0, sequence.number
        tenant, owner = self._shares.level(request.tenant, request.owner)
        through = sequence.arrived * self._step_tokens + entry.to_compute
        return -request.priority, tenant, owner, through, sequence.number


_key_of = attrgetter("key")
