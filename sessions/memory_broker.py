"""The broker of a single process: everything in memory, logs dropped some time after their generation's end."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from sessions.broker import TERMINAL, LoggedEvent, LoggedType, LogSnapshot, SessionEvent
from sessions.errors import LogGone, SubscriberLagged


class MemoryBroker:
    """keep_s: seconds that a log outlives its terminal event. merge_above: a reader with more events than this
    before it gets neighbouring deltas merged. queue_limit: notices that a subscriber may leave unread."""

    def __init__(
        self,
        *,
        keep_s: float = 600.0,
        merge_above: int = 64,
        queue_limit: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep_s = keep_s
        self._merge_above = merge_above
        self._queue_limit = queue_limit
        self._clock = clock
        self._logs: dict[str, _Log] = {}
        self._ended: deque[tuple[float, str]] = deque()
        self._subscribers: dict[str, set[MemorySubscription]] = {}

    async def open(self, generation_id: str, session_id: str) -> None:
        self._expire()
        self._logs[generation_id] = _Log(session_id)

    async def append(self, generation_id: str, type: LoggedType, data: dict[str, Any]) -> int:
        seq = self._log(generation_id).append(type, data)
        if type in TERMINAL:
            self._ended.append((self._clock() + self._keep_s, generation_id))
        return seq

    async def read(self, generation_id: str, after: int = 0) -> AsyncIterator[LoggedEvent]:
        log = self._log(generation_id)
        if after > log.length:
            raise LogGone(generation_id)  # the reader has seen a log that is not this one
        return log.follow(after, self._merge_above)

    async def snapshot(self, generation_id: str) -> LogSnapshot:
        return self._log(generation_id).snapshot()

    async def publish(self, event: SessionEvent) -> None:
        for subscriber in self._subscribers.get(event.session_id, ()):
            subscriber.put(event)

    def subscribe(self, session_id: str) -> MemorySubscription:
        subscription = MemorySubscription(session_id, self._queue_limit, self._unsubscribe)
        self._subscribers.setdefault(session_id, set()).add(subscription)
        return subscription

    async def drop(self, generation_id: str) -> None:
        self._logs.pop(generation_id, None)

    async def forget(self, session_id: str) -> None:
        self._logs = {key: log for key, log in self._logs.items() if log.session_id != session_id}

    def _log(self, generation_id: str) -> _Log:
        self._expire()
        log = self._logs.get(generation_id)
        if log is None:
            raise LogGone(generation_id)
        return log

    def _expire(self) -> None:
        while self._ended and self._ended[0][0] <= self._clock():
            self._logs.pop(self._ended.popleft()[1], None)

    def _unsubscribe(self, subscription: MemorySubscription) -> None:
        subscribers = self._subscribers.get(subscription.session_id, set())
        subscribers.discard(subscription)
        if not subscribers:
            self._subscribers.pop(subscription.session_id, None)


class _Log:
    """The events of one generation; readers share it and each keeps its own place."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self._events: list[LoggedEvent] = []
        self._text: list[str] = []
        self._changed = asyncio.Event()

    @property
    def length(self) -> int:
        return len(self._events)

    @property
    def ended(self) -> bool:
        return bool(self._events) and self._events[-1].terminal

    def append(self, type: LoggedType, data: dict[str, Any]) -> int:
        if self.ended:
            raise ValueError("nothing follows the terminal event")
        seq = len(self._events) + 1
        self._events.append(LoggedEvent(seq, seq, type, data))
        if type == "generation.delta":
            self._text.append(data["text"])
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return seq

    def snapshot(self) -> LogSnapshot:
        self._text = ["".join(self._text)]
        return LogSnapshot(self._text[0], len(self._events))

    async def follow(self, after: int, merge_above: int) -> AsyncIterator[LoggedEvent]:
        place = max(after, 0)
        while True:
            changed = self._changed
            behind = len(self._events) - place
            if behind > merge_above:
                event = self._merged(place)
            elif behind > 0:
                event = self._events[place]
            elif self.ended:
                return
            else:
                await changed.wait()
                continue
            place = event.seq
            yield event

    def _merged(self, place: int) -> LoggedEvent:
        """The event after `place`, joined with all deltas that follow it directly if it is one itself."""
        first = self._events[place]
        if first.type != "generation.delta":
            return first
        run = [first]
        for event in self._events[place + 1 :]:
            if event.type != "generation.delta":
                break
            run.append(event)
        text = "".join(event.data["text"] for event in run)
        return LoggedEvent(first.seq, run[-1].seq, first.type, {**first.data, "text": text})


class MemorySubscription:
    """See Subscription. Progress notices are the first to go when the queue is full."""

    def __init__(self, session_id: str, limit: int, on_close: Callable[[MemorySubscription], None]) -> None:
        self.session_id = session_id
        self._limit = limit
        self._on_close = on_close
        self._queue: deque[SessionEvent] = deque()
        self._wake = asyncio.Event()
        self._lagged = False
        self._closed = False

    def put(self, event: SessionEvent) -> None:
        if len(self._queue) >= self._limit and not self._make_room():
            self._lagged = True
        else:
            self._queue.append(event)
        self._wake.set()

    def _make_room(self) -> bool:
        for waiting in self._queue:
            if waiting.type == "generation.progress":
                self._queue.remove(waiting)
                return True
        return False

    def __aiter__(self) -> AsyncIterator[SessionEvent]:
        return self

    async def __anext__(self) -> SessionEvent:
        while not self._closed:
            if self._lagged:
                raise SubscriberLagged(self.session_id)
            if self._queue:
                return self._queue.popleft()
            self._wake.clear()
            await self._wake.wait()
        raise StopAsyncIteration

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self._on_close(self)
