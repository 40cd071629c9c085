"""The tokens of one step, and how prefills share them."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from engine.sequence import Sequence


class Budget:
    """At most `tokens` in a step, however they are given out; each sequence gets one stretch of its pending tokens."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens
        self.counts: dict[Sequence, int] = {}

    def give(self, sequence: Sequence, at_most: int) -> None:
        held = self.counts.get(sequence, 0)
        count = min(at_most, sequence.pending - held, self.left)
        if count > 0:
            self.counts[sequence] = held + count
            self.left -= count

    def take_back(self, sequence: Sequence) -> None:
        """The sequence is not computed after all."""
        self.left += self.counts.pop(sequence, 0)


def give_first(budget: Budget, prefills: Ordered[Sequence], share: int) -> None:
    """The first part of what decoding has left: half of it to the oldest prefill, so that it always advances, then to
    the short ones (at most `share` tokens to go), oldest first. `prefills` are in that order.

    Newcomers get theirs next, and `give_rest` what then remains. So a short prompt passes a long one through the other
    half, and a long one of n tokens, once the prefills before it are through, takes at most twice the steps that it
    would take alone, however many short ones come.
    """
    if prefills:
        budget.give(prefills[0], (budget.left + 1) // 2)
    for sequence in prefills:
        if sequence.pending <= share:
            budget.give(sequence, sequence.pending)


def give_rest(budget: Budget, prefills: Ordered[Sequence]) -> None:
    """What is left, in equal parts; what one of them cannot use goes to those behind it, then to those before."""
    for position, sequence in enumerate(prefills):
        budget.give(sequence, -(-budget.left // (len(prefills) - position)))
    for sequence in prefills:
        budget.give(sequence, budget.left)
