"""How long all may take. What does not fit any more is left out, rather than cut off in the middle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """seconds: for everything, from `started`, in the seconds of `clock`."""

    seconds: float
    clock: Callable[[], float]
    started: float

    @classmethod
    def begin(cls, seconds: float, clock: Callable[[], float]) -> Budget:
        return cls(seconds, clock, clock())

    @property
    def spent(self) -> float:
        return self.clock() - self.started

    @property
    def left(self) -> float:
        return max(0.0, self.seconds - self.spent)

    def holds(self, seconds: float) -> bool:
        """Whether something that takes about so long may begin."""
        return seconds <= self.left
