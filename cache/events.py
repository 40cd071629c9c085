"""What happened to the set of cached pages, for whoever mirrors it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from cache.tokens import PageIds, TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """`pages` now hold `tokens`, behind page `parent` (None at the start of a sequence)."""

    namespace: str
    parent: int | None
    pages: PageIds
    tokens: TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class Removed:
    """`pages` are cached no more. A page stands before the one that it followed."""

    pages: PageIds


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is cached any more."""


@dataclass(frozen=True, slots=True)
class Resync:
    """Events were lost: forget everything. What is cached follows as Stored events, parents first."""


Event: TypeAlias = Stored | Removed | Cleared | Resync


class EventLog:
    """Keeps events until they are drained, up to `max_pages` pages in all.

    Beyond that it drops them and keeps no more; the next drain then tells the whole state instead. So a log that
    nobody reads costs nothing in the long run.
    """

    def __init__(self, max_pages: int) -> None:
        self._max_pages = max_pages
        self._events: list[Event] = []
        self._pages = 0
        self._lost = False

    @property
    def recording(self) -> bool:
        return not self._lost

    def add(self, event: Event, n_pages: int) -> None:
        if self._lost:
            return
        self._pages += max(1, n_pages)
        if self._pages > self._max_pages:
            self._events, self._lost = [], True
        else:
            self._events.append(event)

    def drain(self, resident: Callable[[], Iterable[Stored]]) -> list[Event]:
        events: list[Event] = [Resync(), *resident()] if self._lost else self._events
        self._events, self._pages, self._lost = [], 0, False
        return events
