"""A step on the device, and what it gives.

A step has places: one row of logits each, in the order of the plan. The tokens of some are chosen on the device, and
the step behind may go on from them before the host knows them; the logits of the others come to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.devices import told_if_lost
from engine.link import Arrival
from engine.sampling import Chosen, Draw, Verdict


@dataclass(frozen=True, slots=True)
class Places:
    """drawn: those whose token the device chooses, by `draws`. rest: those whose logits come to the host."""

    drawn: list[int]
    draws: list[Draw]
    rest: list[int]

    @classmethod
    def of(cls, draws: Sequence[Draw | None]) -> Places:
        """draws: for each place, None where its logits are to come."""
        drawn = [(place, draw) for place, draw in enumerate(draws) if draw is not None]
        rest = [place for place, draw in enumerate(draws) if draw is None]
        return cls([place for place, _ in drawn], [draw for _, draw in drawn], rest)


@dataclass(frozen=True, slots=True)
class Outcome:
    """chosen: by place, a token and the verdict on it. logits: [R, vocab] float32 of the places `rest`, in host memory
    that the next step but one writes over."""

    chosen: dict[int, tuple[int, Verdict]]
    rest: list[int]
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class Launched:
    """May still be running. indices: by the number of a sequence, where its token is in `chosen`."""

    places: Places
    arrival: Arrival
    chosen: Chosen | None
    indices: dict[int, int]

    def wait(self) -> Outcome:
        """Raises DeviceLost."""
        with told_if_lost():
            *chosen, logits = self.arrival.wait()
        ids, verdicts = (numbers.tolist() for numbers in chosen) if chosen else ([], [])
        pairs = zip(ids, map(Verdict, verdicts), strict=True)
        return Outcome(dict(zip(self.places.drawn, pairs, strict=True)), self.places.rest, logits)

    def look(self, place: int) -> torch.Tensor:
        """The logits, [vocab], of a place on whose token the verdict is LOOK. Waits for all that was launched."""
        assert self.chosen is not None
        return self.chosen.rows[self.places.drawn.index(place)].cpu()
