"""How many drafts are worth making for a sequence, by how its last ones went."""

from __future__ import annotations

_WEIGHT = 0.15
_START = 0.6
_REST, _LONGEST_REST = 4, 64


class Pace:
    """Between none and `most` drafts. If each is right with probability p, the nth saves p ** n of a step and takes
    `cost` of one: as many are made as save more than they cost. p is a moving mean over the drafts that were looked at.

    Where not even one pays, it rests for 4 tokens and tries one draft; each try that fails doubles the rest, up to 64
    tokens. So a text that cannot be guessed soon pays for one wrong draft in 64 tokens.
    """

    def __init__(self, most: int, cost: float) -> None:
        self._most = most
        self._cost = cost
        self._right = _START
        self._rest = _REST
        self._rest_until = 0

    def wanted(self, generated: int) -> int:
        """Drafts for the next step of a sequence that has `generated` tokens."""
        if self._right < self._cost:
            return int(generated >= self._rest_until)
        wanted, saved = 1, self._right * self._right
        while wanted < self._most and saved >= self._cost:
            wanted, saved = wanted + 1, saved * self._right
        return wanted

    def went(self, drafted: int, kept: int, generated: int) -> None:
        """A step has kept so many of its drafts, at least one; the sequence has `generated` tokens after it."""
        if self._right < self._cost and kept:
            self._right, self._rest = _START, _REST
        for place in range(min(kept + 1, drafted)):  # those behind the first wrong one were not looked at
            self._right += _WEIGHT * ((place < kept) - self._right)
        if self._right < self._cost:
            self._rest_until = generated + self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)
