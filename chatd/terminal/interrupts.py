"""Ctrl-C: stops the running answer, and leaves where none is running."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Counts interrupts while an answer is running; elsewhere Ctrl-C is a KeyboardInterrupt as usual.

    cancelling: one came during this answer. leaving: a second one did.
    """

    def __init__(self) -> None:
        self._answering = False
        self._count = 0
        self._earlier: Any = None

    @property
    def cancelling(self) -> bool:
        return self._count > 0

    @property
    def leaving(self) -> bool:
        return self._count > 1

    def answer_begins(self) -> None:
        self._count = 0
        self._answering = True

    def answer_ends(self) -> None:
        self._answering = False

    def __enter__(self) -> Interrupts:
        self._earlier = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._earlier)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if not self._answering:
            raise KeyboardInterrupt
        self._count += 1
