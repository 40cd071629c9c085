"""Turns from start to end: the only place that speaks to the engine.

start ── repeated? ── load ── encode, fit ── engine.check ── one transaction ── submit ── the turn runs on its own
                                                                                                │
readers ── events (replay, then live) ──────────────── broker ◄── started, deltas, the terminal event
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.api import Engine
from engine.errors import EngineStopped
from sessions.autosave import Autosave
from sessions.broker import Broker, LoggedEvent, SessionEvent
from sessions.errors import SessionBusy
from sessions.planner import Planner
from sessions.records import Generation, Message, Turn
from sessions.running_turn import RunningTurn
from sessions.session_queries import session_row
from sessions.store import Store
from sessions.turn_plan import TurnPlan, TurnRequest
from sessions.turn_queries import active_generation, find_repeated, generation_of, insert_turn, interrupt
from sessions.turn_runner import TurnRunner, done_data
from sessions.wire import session_json, turn_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """All in seconds.

    save_interval: between two saves of running replies. stop_wait: how long to wait for the engine to end an aborted
    turn. first_retry and last_retry: the range of the pauses between attempts to save the end of a turn.
    """

    save_interval: float = 1.0
    stop_wait: float = 5.0
    first_retry: float = 0.1
    last_retry: float = 5.0


class TurnService:
    """Starts, watches and stops turns. One per process; `recover` first, `close` last."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        broker: Broker,
        *,
        settings: TurnSettings | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._store = store
        self._engine = engine
        self._broker = broker
        self._settings = settings or TurnSettings()
        self._planner = Planner(store, engine)
        self._running: dict[str, RunningTurn] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._autosave = Autosave(store, self._running, self._settings.save_interval)
        self._runner = TurnRunner(store, broker, self._settings.first_retry, self._settings.last_retry, sleep)
        self._beginning: set[asyncio.Task[Turn]] = set()
        self._unwanted: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def broker(self) -> Broker:
        return self._broker

    async def start(
        self,
        owner: str,
        session_id: str,
        *,
        content: str,
        parent_id: str | None = None,
        client_msg_id: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> Turn:
        """Starts a turn and returns at once; a caller that goes away does not stop it.

        parent_id None continues the active leaf. The same client_msg_id and body give the same turn again.
        Raises InvalidInput, NotFound, SessionBusy, IdempotencyConflict, ContextOverflow, StorageBusy and the engine's
        RequestTooLong, QueueFull, EngineStopped; then nothing was written.
        """
        asked = TurnRequest.checked(content, parent_id, client_msg_id, params)
        async with self._store.read() as db:
            await session_row(db, owner, session_id)
            repeated = await find_repeated(db, session_id, asked)
            active = await active_generation(db, session_id)
        if repeated is not None:
            return repeated
        if self._closing:
            raise EngineStopped("the server is shutting down")
        if active in self._running:
            raise SessionBusy(session_id)
        if active is not None:
            await self._interrupt(active)
        plan = await self._planner.plan(owner, session_id, asked)
        self._engine.check(len(plan.request.tokens), plan.request.params)
        beginning = asyncio.create_task(self._begin(plan))
        self._beginning.add(beginning)
        beginning.add_done_callback(self._begun)
        return await asyncio.shield(beginning)

    def _begun(self, beginning: asyncio.Task[Turn]) -> None:
        self._beginning.discard(beginning)
        if not beginning.cancelled():
            beginning.exception()  # a caller that went away does not ask for it

    async def _begin(self, plan: TurnPlan) -> Turn:
        """Writes and submits, both or neither: the engine refuses before the commit, a failed commit aborts."""
        turn, gid = plan.turn, plan.turn.generation.id
        events = None
        try:
            async with self._store.write() as db:
                row = await session_row(db, plan.owner, turn.message.session_id, lock=True)
                repeated = await find_repeated(db, row.id, plan.asked)
                if repeated is not None:
                    return repeated
                if self._closing:
                    raise EngineStopped("the server is shutting down")
                session = await insert_turn(db, row, plan, self._store.now())
                events = self._engine.submit(plan.request)
                running = self._running[gid] = RunningTurn(turn, self._engine.codec)
                await self._broker.open(gid, session.id)
        except BaseException:
            if events is not None:
                self._engine.abort(gid)
                unwanted = asyncio.create_task(_read_to_the_end(events))
                self._unwanted.add(unwanted)
                unwanted.add_done_callback(self._unwanted.discard)
                self._running.pop(gid).ended.set()
                await self._broker.drop(gid)
            raise
        await self._broker.publish(SessionEvent("message.created", session.id, gid, turn_json(turn)))
        if plan.cut is not None:
            counts = {"dropped_messages": plan.cut.dropped_messages, "dropped_tokens": plan.cut.dropped_tokens}
            await self._broker.publish(SessionEvent("context.trimmed", session.id, gid, counts))
        await self._broker.publish(SessionEvent("session.updated", session.id, None, session_json(session)))
        self._autosave.start()
        self._tasks[gid] = asyncio.create_task(self._run(running, events), name=gid)
        return turn

    async def _run(self, running: RunningTurn, events: AsyncIterator[Any]) -> None:
        gid = running.turn.generation.id
        try:
            await self._runner.run(running, events)
        finally:
            self._running.pop(gid, None)
            self._tasks.pop(gid, None)
            running.ended.set()

    def running(self, session_id: str) -> str | None:
        """The id of the generation that runs in this session now."""
        return next((gid for gid, it in self._running.items() if it.turn.message.session_id == session_id), None)

    async def generation(self, owner: str, generation_id: str) -> Generation:
        """Raises NotFound, StorageBusy."""
        async with self._store.read() as db:
            generation, _ = await generation_of(db, owner, generation_id)
        running = self._running.get(generation_id)
        return replace(generation, status=running.status) if running and generation.status == "queued" else generation

    async def snapshot(self, owner: str, generation_id: str) -> tuple[Message, int]:
        """The reply as it is now and the number of the last event in it: follow with events(after=that number).

        Raises NotFound, LogGone, StorageBusy.
        """
        await self.generation(owner, generation_id)
        text, seq = await self._broker.snapshot(generation_id)
        running = self._running.get(generation_id)
        if running is not None:
            return replace(running.turn.reply, content=text), seq
        async with self._store.read() as db:
            _, message = await generation_of(db, owner, generation_id)
        return message, seq

    async def events(self, owner: str, generation_id: str, after: int = 0) -> AsyncIterator[LoggedEvent]:
        """Events numbered above `after`: those logged already, then live ones, ending after the terminal one.

        Raises NotFound, LogGone, StorageBusy at once, not while iterating.
        """
        await self.generation(owner, generation_id)
        return await self._broker.read(generation_id, after)

    async def cancel(self, owner: str, generation_id: str) -> Generation:
        """Stops a generation and keeps its text; one that has ended is left as it is.

        Gives it as it then is: still running only if the engine takes longer than stop_wait.
        Raises NotFound, StorageBusy.
        """
        await self.generation(owner, generation_id)
        await self._stop(generation_id)
        return await self.generation(owner, generation_id)

    async def stop_session(self, session_id: str) -> None:
        """Cancels the session's running turn, if any, and waits for it as `cancel` does."""
        generation_id = self.running(session_id)
        if generation_id is not None:
            await self._stop(generation_id)

    async def forget_session(self, session_id: str) -> None:
        """After the session's rows are gone: whatever still runs there ends unsaved, and its logs are dropped."""
        for running in [it for it in self._running.values() if it.turn.message.session_id == session_id]:
            running.deleted = True
            gid = running.turn.generation.id
            self._engine.abort(gid)
            await self._broker.append(gid, "generation.done", done_data(running.end("interrupted")))
        await self._broker.forget(session_id)

    async def _stop(self, generation_id: str) -> None:
        running = self._running.get(generation_id)
        if running is not None:
            self._engine.abort(generation_id)
            await self._settled([running])

    async def _settled(self, turns: list[RunningTurn], within: float | None = None) -> None:
        limit = self._settings.stop_wait if within is None else within
        waits = [asyncio.create_task(turn.ended.wait()) for turn in turns]
        try:
            if waits:
                await asyncio.wait(waits, timeout=limit)
        finally:
            for wait in waits:
                wait.cancel()

    async def save_now(self) -> None:
        """Saves the text that running turns have written so far. Raises StorageBusy."""
        await self._autosave.save()

    async def recover(self) -> int:
        """At start-up: turns that a predecessor left running become `interrupted`, saved text kept. Gives their number.

        Raises StorageBusy.
        """
        count = await self._interrupt()
        if count:
            logger.warning("%d turns of the previous process were interrupted", count)
        return count

    async def _interrupt(self, generation_id: str | None = None) -> int:
        async with self._store.write() as db:
            return await interrupt(db, generation_id)

    async def close(self, grace_s: float) -> None:
        """Starts nothing more, gives running turns `grace_s` seconds, stops the rest as `interrupted`, text kept.

        When it is cancelled, the turns go on until the next call.
        """
        self._closing = True
        await asyncio.gather(*self._beginning, return_exceptions=True)
        await self._settled(list(self._running.values()), grace_s)
        rest = list(self._running.values())
        for running in rest:
            running.interrupted = True
            self._engine.abort(running.turn.generation.id)
        await self._settled(rest)
        unheard = [running for running in self._running.values() if not running.ending]
        for running in unheard:
            self._tasks[running.turn.generation.id].cancel()
        await self._settled(unheard)
        unsaved = list(self._tasks.values())
        for task in unsaved:
            task.cancel()
        await asyncio.gather(*unsaved, return_exceptions=True)
        await self._autosave.stop()


async def _read_to_the_end(events: AsyncIterator[Any]) -> None:
    """Whoever counts the engine's requests has to see the end of an aborted one, too."""
    async for _ in events:
        pass
