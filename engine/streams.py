"""Events on their way from the engine's thread to the loops that read them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable

from engine.api import Event, Failed, Finished

log = logging.getLogger(__name__)


class EventStream:
    """The events of one request, as an async iterator on the loop that submitted it. One reader."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    def put(self, event: Event) -> None:
        self._events.append(event)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        while not self._events:
            self._waiter = self.loop.create_future()
            await self._waiter
        event = self._events.popleft()
        self._ended = isinstance(event, Finished | Failed)
        return event


def deliver(batch: Iterable[tuple[EventStream, Event]]) -> None:
    """Hands events to their loops from another thread, in one call for each loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[EventStream, Event]]] = {}
    for stream, event in batch:
        by_loop.setdefault(stream.loop, []).append((stream, event))
    for loop, events in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, events)
        except RuntimeError:  # the loop was closed: nobody is left to read
            log.warning("%d events found no reader", len(events))


def _put_all(batch: Iterable[tuple[EventStream, Event]]) -> None:
    for stream, event in batch:
        stream.put(event)
