"""The multi-turn load: sessions that take turns, each with a growing history, behind one system prompt."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from importlib.resources import files
from itertools import cycle, islice
from pathlib import Path
from random import Random

from chatd.bench.client import Message
from chatd.bench.load import Load
from chatd.failure import CommandFailed

_SYSTEM = (
    "You are a careful assistant of a town's records office. Answer in plain words, say what you are sure of and what "
    "you only suppose, and name the records that a clerk would look at first."
)


@dataclass(frozen=True, slots=True)
class Conversations:
    """sessions x turns requests. system_words: length of the shared system prompt, 0 for none. think_s: a user waits
    up to so many seconds, evenly at random, before a turn after the first."""

    sessions: int
    turns: int
    max_tokens: int
    system_words: int
    think_s: float
    seed: int

    async def run(self, load: Load, questions: list[str]) -> None:
        await asyncio.gather(*(self._session(number, load, questions) for number in range(self.sessions)))

    async def _session(self, number: int, load: Load, questions: list[str]) -> None:
        """A turn that fails is left out of the history. Labels: session from 0 on, turn from 1 on."""
        random = Random(f"{self.seed} {number}")
        shuffled = random.sample(questions, k=len(questions))
        history: list[Message] = []
        if self.system_words:
            system = " ".join(islice(cycle(_SYSTEM.split()), self.system_words))
            history.append({"role": "system", "content": system})
        for turn, question in enumerate(islice(cycle(shuffled), self.turns), 1):
            if turn > 1 and self.think_s:
                await asyncio.sleep(random.uniform(0, self.think_s))
            asked: Message = {"role": "user", "content": question}
            answer = await load.ask([*history, asked], self.max_tokens, session=number, turn=turn)
            if answer is not None:
                history += [asked, {"role": "assistant", "content": answer.text}]


def read_questions(path: Path | None) -> list[str]:
    """A question a line, or the first of `turns` of each JSON object in .jsonl (as MT-Bench has them). Without a path
    those that come with chatd. Raises CommandFailed."""
    try:
        text = (path or files("chatd.bench") / "questions.txt").read_text(encoding="utf-8")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if path is not None and path.suffix == ".jsonl":
            lines = [str(json.loads(line)["turns"][0]) for line in lines]
    except OSError as error:
        raise CommandFailed(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise CommandFailed(f"{path} has no questions: one a line, or in .jsonl an object with turns") from error
    if not lines:
        raise CommandFailed(f"{path} is empty")
    return lines
