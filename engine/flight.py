"""A step between its launch and its landing, as the stepper sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.launched import Launched
from engine.scheduling.plan import StepRow
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Sampling:
    """A sequence that samples in a step: its first place, and the drafts behind it."""

    sequence: Sequence
    first: int
    drafts: tuple[int, ...] = ()

    @property
    def places(self) -> range:
        return range(self.first, self.first + 1 + len(self.drafts))


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step until it has landed. leads: the next one may be launched before that, since all that it needs of
    this one is on the device. wrong: numbers of sequences that it computes a wrong token of."""

    rows: list[StepRow]
    launched: Launched
    leads: bool
    wrong: set[int] = field(default_factory=set)
