"""Drafters for tests, which know how the text goes on, and engines that use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

import engine.loading
from engine.speculation import Ask, Drafter

Guess = Callable[[list[int]], list[int]]
"""From the ids that follow to the guess at them."""


@dataclass
class Knowing:
    """Guesses by `guess` from what is known to follow; nothing for a sequence that is not among `texts`."""

    guess: Guess
    cost: float = 0.2
    texts: list[list[int]] = field(default_factory=list)
    asks: list[tuple[int, int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)

    def knows(self, prompt: np.ndarray, ids: Sequence[int]) -> None:
        self.texts.append([*prompt.tolist(), *ids])

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        self.asks += [(ask.number, ask.at_most) for ask in asks]
        return [self.guess(self._follows(ask))[: ask.at_most] for ask in asks]

    def drop(self, number: int) -> None:
        self.dropped.append(number)

    def _follows(self, ask: Ask) -> list[int]:
        tokens = ask.tokens.tolist()
        for text in self.texts:
            if text[: len(tokens)] == tokens:
                return text[len(tokens) : len(tokens) + ask.at_most]
        return []


def right(follows: list[int]) -> list[int]:
    return follows


def wrong(follows: list[int]) -> list[int]:
    return [3 + (token - 2) % 200 for token in follows]


def mixed(seed: int) -> Guess:
    """Each token right with a probability of 0.7, any number of them."""
    chance = Random(seed)

    def guess(follows: list[int]) -> list[int]:
        count = chance.randint(0, len(follows))
        return [token if chance.random() < 0.7 else chance.randrange(3, 250) for token in follows[:count]]

    return guess


def use(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are loaded from now on, with speculation on, have this drafter."""

    def load(config: engine.loading.EngineConfig, *_: object) -> Drafter | None:
        return None if config.speculation == "off" else drafter

    monkeypatch.setattr(engine.loading, "load_drafter", load)
