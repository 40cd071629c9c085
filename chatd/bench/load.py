"""Runs requests side by side, keeps what came of each, and ends early without losing it."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Self

from tqdm import tqdm

from chatd.bench.client import Answer, ChatClient, Message, RequestFailed

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Row:
    """One request: which it was (such as session and turn), how much was asked, and its answer or its error."""

    labels: dict[str, int | str]
    max_tokens: int
    outcome: Answer | RequestFailed


class Load:
    """The requests of one load, in the order of their ends. A context, which draws a progress bar on a terminal."""

    def __init__(self, client: ChatClient, title: str, *, concurrency: int, expected: int) -> None:
        """At most `concurrency` requests run at a time; `expected` ones are all."""
        self.rows: list[Row] = []
        self._client = client
        self._free = asyncio.Semaphore(concurrency)
        self._bar = tqdm(total=expected, desc=title, unit="request", leave=False, disable=None)
        self._told: set[str] = set()
        self._first: float | None = None
        self._last = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    async def ask(self, messages: Sequence[Message], max_tokens: int, **labels: int | str) -> Answer | None:
        """Waits for its turn, unmeasured. None when it failed; each kind of failure is told once, on stderr."""
        outcome: Answer | RequestFailed
        async with self._free:
            if self._first is None:
                self._first = perf_counter()
            try:
                outcome = await self._client.complete(messages, max_tokens)
            except RequestFailed as error:
                outcome = error
            self._last = perf_counter()
        self.rows.append(Row(labels, max_tokens, outcome))
        self._bar.update()
        if isinstance(outcome, Answer):
            return outcome
        if (text := str(outcome)) not in self._told:
            self._told.add(text)
            tqdm.write(f"chatd: a request failed: {text}", file=sys.stderr)
        return None

    @property
    def wall_s(self) -> float:
        """From the first request sent to the last end."""
        return 0.0 if self._first is None else max(0.0, self._last - self._first)


def answers_of(rows: Sequence[Row]) -> list[Answer]:
    return [row.outcome for row in rows if isinstance(row.outcome, Answer)]


def errors_of(rows: Sequence[Row]) -> Counter[str]:
    """How many requests failed, by what was said."""
    return Counter(str(row.outcome) for row in rows if isinstance(row.outcome, RequestFailed))


def other_lengths(rows: Sequence[Row]) -> list[int]:
    """The lengths of answers that did not get as long as was asked, in tokens."""
    asked = [(row.max_tokens, row.outcome) for row in rows if isinstance(row.outcome, Answer)]
    return [answer.output_tokens for wanted, answer in asked if answer.output_tokens != wanted]


async def until_interrupted(work: Coroutine[Any, Any, None]) -> bool:
    """Runs it to its end, or until SIGINT or SIGTERM, when it is cancelled and the result is True."""
    loop, task, interrupted = asyncio.get_running_loop(), asyncio.ensure_future(work), False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, interrupt)
    try:
        await task
    except asyncio.CancelledError:
        if not interrupted:
            raise
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
    return interrupted
