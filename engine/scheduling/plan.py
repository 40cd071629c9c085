"""What one step computes, and what happened to the sequences while it was planned."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepRow:
    """Compute tokens start .. start + count - 1 of a sequence; the logits of the last `sampled` of them are wanted."""

    sequence: Sequence
    start: int
    count: int
    sampled: int

    @classmethod
    def next(cls, sequence: Sequence, count: int) -> StepRow:
        """The first `count` pending tokens."""
        return cls(sequence, sequence.computed, count, sampled=int(count == sequence.pending))

    @property
    def samples(self) -> bool:
        return self.sampled > 0


@dataclass(slots=True)
class StepPlan:
    """rows: what to compute, decode first. admitted: who entered for the first time. preempted: who lost its pages.
    exhausted: who can have no page more, whoever else makes room; it is scheduled no longer."""

    rows: list[StepRow] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    exhausted: list[Sequence] = field(default_factory=list)
