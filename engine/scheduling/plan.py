"""What one step computes, and what happened to the sequences while it was planned."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepRow:
    """Compute tokens start .. start + count - 1 of a sequence; the logits of the last `sampled` of them are wanted.

    drafts: guesses at its next tokens, which are the last ones of the row; `sequence.tokens` does not have them.
    """

    sequence: Sequence
    start: int
    count: int
    sampled: int
    drafts: tuple[int, ...] = ()

    @classmethod
    def next(cls, sequence: Sequence, count: int) -> StepRow:
        """The first `count` pending tokens."""
        return cls(sequence, sequence.computed, count, sampled=int(count == sequence.pending))

    def with_drafts(self, drafts: tuple[int, ...]) -> StepRow:
        """The same row, which must sample, followed by guesses."""
        more = len(drafts)
        return replace(self, count=self.count + more, sampled=self.sampled + more, drafts=drafts)

    @property
    def known(self) -> int:
        """How many of its tokens the sequence has."""
        return self.count - len(self.drafts)

    @property
    def samples(self) -> bool:
        return self.sampled > 0


@dataclass(slots=True)
class StepPlan:
    """rows: what to compute, decode first. admitted: who entered for the first time. preempted: who lost its pages.
    exhausted: who can have no page more, whoever else makes room; it is scheduled no longer. spare: tokens that the
    step could compute besides."""

    rows: list[StepRow] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    exhausted: list[Sequence] = field(default_factory=list)
    spare: int = 0
