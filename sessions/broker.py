"""How events leave a turn: one log per generation, and notices to whoever watches a session.

append ── log: 1 started · 2..n deltas · n+1 the terminal event ── read(after) replays, then follows
publish ── notices: no number, not kept ── subscribe(session)
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

LoggedType = Literal["generation.started", "generation.delta", "generation.done", "generation.failed"]
NoticeType = Literal["message.created", "session.updated", "session.deleted", "context.trimmed", "generation.progress"]
TERMINAL: frozenset[str] = frozenset({"generation.done", "generation.failed"})


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """An event of a generation's log, numbered from 1 without gaps; data is JSON-ready.

    seq_from < seq when deltas seq_from..seq were merged into one for a reader that lags behind.
    """

    seq_from: int
    seq: int
    type: LoggedType
    data: dict[str, Any]

    @property
    def terminal(self) -> bool:
        return self.type in TERMINAL


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """A notice about a session; data is JSON-ready, in the shape that clients see."""

    type: NoticeType
    session_id: str
    generation_id: str | None
    data: dict[str, Any]


class LogSnapshot(NamedTuple):
    """The text logged so far (all deltas joined) and the number of the last event that it covers."""

    text: str
    seq: int


class Subscription(Protocol):
    """Notices of one session from the moment of `subscribe` on, through a bounded queue.

    Iterating raises SubscriberLagged once the queue has run full, and ends after `close`.
    """

    def __aiter__(self) -> AsyncIterator[SessionEvent]: ...

    async def __anext__(self) -> SessionEvent: ...

    def close(self) -> None: ...


class Broker(Protocol):
    """Event logs and fan-out. Only the process that runs a generation appends to its log."""

    async def open(self, generation_id: str, session_id: str) -> None:
        """Starts an empty log."""
        ...

    async def append(self, generation_id: str, type: LoggedType, data: dict[str, Any]) -> int:
        """Adds an event and gives its number. The terminal event ends the log; it is then kept for a while."""
        ...

    async def read(self, generation_id: str, after: int = 0) -> AsyncIterator[LoggedEvent]:
        """Events numbered above `after`: those there, then new ones, ending after the terminal one. Raises LogGone."""
        ...

    async def snapshot(self, generation_id: str) -> LogSnapshot:
        """Text and number of the same instant. Raises LogGone."""
        ...

    async def publish(self, event: SessionEvent) -> None: ...

    def subscribe(self, session_id: str) -> Subscription: ...

    async def drop(self, generation_id: str) -> None:
        """Ends the keeping of one log; readers that are under way keep theirs to its end."""
        ...

    async def forget(self, session_id: str) -> None:
        """Drops all logs of a deleted session."""
        ...
