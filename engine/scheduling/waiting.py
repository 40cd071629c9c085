"""Who waits, and in which order they are let in."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
    for a twin."""

    sequence: Sequence
    cached: int
    needs: int = 0
    refused_in: int = 0
    overtaken: int = 0
    passed: int = 0
    hold: Hold | None = None
    held_times: int = 0

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
        self._step_tokens = step_tokens
        self._entries: dict[int, Waiting] = {}
        self._background = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._entries.values())

    def count(self, background: bool) -> int:
        return self._background if background else len(self._entries) - self._background

    def add(self, entry: Waiting) -> None:
        self._entries[entry.sequence.number] = entry
        self._background += entry.sequence.background

    def remove(self, sequence: Sequence) -> bool:
        """False where it does not wait."""
        if self._entries.pop(sequence.number, None) is None:
            return False
        self._background -= sequence.background
        return True

    def admitted(self, entry: Waiting) -> None:
        """Takes it out, and remembers it for those that came before and wait on."""
        sequence = entry.sequence
        self.remove(sequence)
        for other in self._entries.values():
            earlier = other.sequence
            same = earlier.request.priority == sequence.request.priority
            if same and earlier.number < sequence.number and other.hold is None:
                other.overtaken += 1
                other.passed += other.needs > 0

    def best(self, count: int, background: bool, may_enter: Callable[[Waiting], bool]) -> list[Waiting]:
        """The first `count` of one class among those that may enter, in O(waiting)."""
        able = [e for e in self._entries.values() if e.sequence.background == background and may_enter(e)]
        return heapq.nsmallest(count, able, key=self.key)

    def key(self, entry: Waiting) -> Key:
        sequence = entry.sequence
        request = sequence.request
        if entry.first:
            return -request.priority, -1, 0, 0, sequence.number
        tenant, owner = self._shares.level(request.tenant, request.owner)
        through = sequence.arrived * self._step_tokens + entry.to_compute
        return -request.priority, tenant, owner, through, sequence.number
