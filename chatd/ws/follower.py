"""Carries the events of generations and the notices of sessions to one connection, each exactly once and in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from chatd.owner import OWNER
from sessions import (
    LoggedEvent,
    LogGone,
    NotFound,
    SessionEvent,
    SessionService,
    SubscriberLagged,
    Subscription,
    TurnService,
    message_json,
)

logger = logging.getLogger(__name__)

CLOSE_STALLED = 4408
CLOSE_BROKEN = 1011

Send = Callable[[dict[str, Any]], Awaitable[None]]
"""Puts a frame into the connection's bounded queue; waits while that is full."""


class Follower:
    """One task for each followed generation and each subscribed session.

    They wait while the outbox is full: events then stay in their log, which merges deltas for readers that are behind.

    close: ends the connection with a code, when the client has missed something and must come back to read it anew.
    """

    def __init__(
        self,
        turns: TurnService,
        sessions: SessionService,
        send: Send,
        *,
        snapshot_above: int,
        close: Callable[[int], None],
    ) -> None:
        self._turns = turns
        self._sessions = sessions
        self._send = send
        self._snapshot_above = snapshot_above
        self._close_connection = close
        self._session_of: dict[str, str] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        self._watching: dict[str, tuple[Subscription, asyncio.Task[None]]] = {}

    async def resume(self, generation_id: str, last_seq: int) -> None:
        """Goes on after `last_seq`, or sends resume.reset where that is not possible any more."""
        try:
            generation = await self._turns.generation(OWNER, generation_id)
        except NotFound:
            await self._send({"type": "resume.reset", "generation": generation_id, "data": {"message": None}})
            return
        self.follow(generation.session_id, generation_id, last_seq)

    def follow(self, session_id: str, generation_id: str, after: int = 0) -> None:
        """Sends the generation's events numbered above `after`; nothing new if this connection follows it already."""
        if generation_id not in self._session_of:
            self._session_of[generation_id] = session_id
            self._start(session_id, generation_id, after)

    async def subscribe(self, session_id: str, acknowledge: Callable[[], Awaitable[None]]) -> None:
        """Acknowledges, then sends the running reply as a snapshot, then everything that happens. Raises NotFound."""
        running = self._turns.running(session_id)
        subscription = None
        if session_id not in self._watching:
            subscription = self._turns.broker.subscribe(session_id)
        try:
            await self._sessions.get(OWNER, session_id)
            await acknowledge()
            if running is not None:
                await self._snapshot(session_id, running)
        except BaseException:
            if subscription is not None:
                subscription.close()
            raise
        if subscription is not None:
            task = asyncio.create_task(self._watch(session_id, subscription))
            self._watching[session_id] = (subscription, task)

    def unsubscribe(self, session_id: str) -> None:
        """Ends the notices of the session and the events of its generations."""
        if watched := self._watching.pop(session_id, None):
            watched[0].close()
            watched[1].cancel()
        for generation_id in [key for key, value in self._session_of.items() if value == session_id]:
            self._stop(generation_id)
            del self._session_of[generation_id]

    async def settle(self) -> None:
        """Waits until all followed generations have been sent to their end."""
        if self._following:
            await asyncio.wait(list(self._following.values()))

    async def close(self) -> None:
        tasks = [*self._following.values(), *(task for _, task in self._watching.values())]
        for subscription, _ in self._watching.values():
            subscription.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, session_id: str, generation_id: str, after: int) -> None:
        task = asyncio.create_task(self._carry(session_id, generation_id, after))
        self._following[generation_id] = task
        task.add_done_callback(lambda done: self._forget(generation_id, done))

    def _forget(self, generation_id: str, task: asyncio.Task[None]) -> None:
        if self._following.get(generation_id) is task:
            del self._following[generation_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("generation %s cannot be followed any more", generation_id, exc_info=error)
            self._close_connection(CLOSE_BROKEN)

    def _stop(self, generation_id: str) -> None:
        if task := self._following.pop(generation_id, None):
            task.cancel()

    async def _carry(self, session_id: str, generation_id: str, after: int) -> None:
        place: int | None = after
        try:
            while place is not None:
                place = await self._carry_events(session_id, generation_id, place)
        except LogGone:
            await self._reset(session_id, generation_id)

    async def _carry_events(self, session_id: str, generation_id: str, after: int) -> int | None:
        """Sends events to the end, or up to a point from which a snapshot is better; then gives where to go on."""
        async for event in await self._turns.broker.read(generation_id, after):
            if event.seq - event.seq_from >= self._snapshot_above:
                return await self._send_snapshot(session_id, generation_id)
            await self._send(_event_frame(session_id, generation_id, event))
        return None

    async def _snapshot(self, session_id: str, generation_id: str) -> None:
        """Replaces whatever is being sent of this generation by a snapshot and what follows it."""
        self._stop(generation_id)
        with contextlib.suppress(NotFound, LogGone):  # not committed yet: message.created will come, and start it
            place = await self._send_snapshot(session_id, generation_id)
            self._session_of[generation_id] = session_id
            self._start(session_id, generation_id, place)

    async def _send_snapshot(self, session_id: str, generation_id: str) -> int:
        """Gives the number after which to go on. The terminal event is always sent as itself, so it is not covered."""
        message, seq = await self._turns.snapshot(OWNER, generation_id)
        place = seq if message.status == "streaming" else max(seq - 1, 0)
        data = {"message": message_json(message)}
        await self._send(
            {"type": "snapshot", "session": session_id, "generation": generation_id, "seq": place, "data": data}
        )
        return place

    async def _reset(self, session_id: str, generation_id: str) -> None:
        """The log is gone: the stored message takes its place."""
        stored = None
        with contextlib.suppress(NotFound):
            generation = await self._turns.generation(OWNER, generation_id)
            tree = await self._sessions.messages(OWNER, session_id, tree=True)
            stored = next((message for message in tree if message.id == generation.message_id), None)
        data = {"message": None if stored is None else message_json(stored)}
        await self._send({"type": "resume.reset", "session": session_id, "generation": generation_id, "data": data})

    async def _watch(self, session_id: str, subscription: Subscription) -> None:
        try:
            async for event in subscription:
                await self._send(_notice_frame(event))
                if event.type == "message.created" and event.generation_id is not None:
                    if event.generation_id in self._following:
                        # Its first events overtook this notice: a snapshot puts the client right.
                        await self._snapshot(session_id, event.generation_id)
                    else:
                        self.follow(session_id, event.generation_id)
        except SubscriberLagged:
            self._close_connection(CLOSE_STALLED)


def _event_frame(session_id: str, generation_id: str, event: LoggedEvent) -> dict[str, Any]:
    frame: dict[str, Any] = {
        "type": event.type,
        "session": session_id,
        "generation": generation_id,
        "seq": event.seq,
        "data": event.data,
    }
    if event.seq_from != event.seq:
        frame["seq_from"] = event.seq_from
    return frame


def _notice_frame(event: SessionEvent) -> dict[str, Any]:
    frame: dict[str, Any] = {"type": event.type, "session": event.session_id}
    if event.generation_id is not None:
        frame["generation"] = event.generation_id
    if event.data:
        frame["data"] = event.data
    return frame
