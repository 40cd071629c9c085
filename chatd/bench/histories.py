"""The time to the first token of a turn, against the length of the history before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from chatd.bench.client import Message
from chatd.bench.load import Load, Row, answers_of
from chatd.bench.statistics import Group
from chatd.bench.words import Prompts

_ANSWER_TOKENS = 8
_MEASURED_TURN = 2


@dataclass(frozen=True, slots=True)
class Histories:
    """lengths: of the history, in tokens. new_words: of the message behind it, a token each. A number of repeats."""

    lengths: Sequence[int]
    new_words: int
    repeats: int
    seed: int

    @property
    def requests(self) -> int:
        return 2 * len(self.lengths) * self.repeats

    async def run(self, load: Load, prompts: Prompts, prefix_cache: bool) -> None:
        """One conversation at a time, of two turns: the first makes the history (its prompt and its answer), the second
        is measured. Labels: prefix_cache (0 or 1, what the server has), history, repeat, turn."""
        random = Random(self.seed)
        for repeat in range(self.repeats):
            for length in self.lengths:
                labels = {"prefix_cache": int(prefix_cache), "history": length, "repeat": repeat}
                history = prompts.of_length(length - _ANSWER_TOKENS, random)
                new: Message = {"role": "user", "content": prompts.text(self.new_words, random)}
                answer = await load.ask(history, _ANSWER_TOKENS, **labels, turn=1)
                if answer is not None:
                    history += [{"role": "assistant", "content": answer.text}, new]
                    await load.ask(history, _ANSWER_TOKENS, **labels, turn=_MEASURED_TURN)


@dataclass(frozen=True, slots=True)
class Point:
    """The turn behind a history of so many tokens, on a server with the prefix cache and on one without."""

    history: int
    cached: Group
    uncached: Group


@dataclass(frozen=True, slots=True)
class Curve:
    """By the length of the history. rows: those of both servers."""

    rows: Sequence[Row]
    points: Sequence[Point]

    @classmethod
    def of(cls, lengths: Sequence[int], rows: Sequence[Row]) -> Curve:
        measured = [row for row in rows if row.labels["turn"] == _MEASURED_TURN]

        def group(length: int, prefix_cache: bool) -> Group:
            kind = (length, int(prefix_cache))
            chosen = [row for row in measured if (row.labels["history"], row.labels["prefix_cache"]) == kind]
            return Group.of(answers_of(chosen))

        return cls(rows, [Point(length, group(length, True), group(length, False)) for length in lengths])
