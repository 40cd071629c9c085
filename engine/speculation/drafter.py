"""What guesses the next tokens of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.api import TokenIds


@dataclass(frozen=True, slots=True)
class Ask:
    """One sequence that wants guesses.

    tokens: all that it has, prompt and output, as a view. at_most: how many guesses, at least one. capacity: the most
    tokens that it may ever hold, guesses included.

    number: the same in every step. Between two asks tokens are only added, until `Drafter.drop`.
    """

    number: int
    tokens: TokenIds
    at_most: int
    capacity: int


CHECKING = 0.2
"""What a step takes longer for each draft, as a share of a step without any. Measured for int4 weights on a CPU, whose
product takes rows by fours: 2 / 3 / 4 / 5 / 8 / 9 rows take 1.2 / 1.3 / 1.4 / 1.9 / 2.3 / 2.8 times as long as one."""


class Drafter(Protocol):
    """Guesses need not be right: a wrong one costs time and changes no text."""

    @property
    def cost(self) -> float:
        """What making and checking a draft takes, as a share of a step of the model."""
        ...

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        """For each ask at most `at_most` ids of the vocabulary, in order; none where there is no good guess."""
        ...

    def drop(self, number: int) -> None:
        """Forgets a sequence. Unknown numbers are ignored."""
        ...
