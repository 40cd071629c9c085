"""All parts of a running server, wired; the app and the sockets hang on one of these."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from chatd.engine_slot import EngineSlot, Loader
from chatd.metrics import EngineCollector, Metrics
from chatd.observe import ObservedEngine
from chatd.settings import Settings
from chatd.storage import open_store
from chatd.ws.hub import Hub
from chatd.ws.timing import SocketTiming
from engine.api import EngineSnapshot, SamplingParams
from engine.errors import EngineStopped, QueueFull
from sessions import MemoryBroker, SessionService, Store, TurnService

logger = logging.getLogger(__name__)


class Tasks:
    """Background tasks that must not be lost; `cancel` ends those that are left."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Backend:
    """Made by `open_backend`. `engine` is the observed one that everybody shares; `slot` says whether it is there yet.

    started: seconds since 1970."""

    settings: Settings
    store: Store
    slot: EngineSlot
    engine: ObservedEngine
    turns: TurnService
    sessions: SessionService
    metrics: Metrics
    hub: Hub
    tasks: Tasks
    loading: asyncio.Task[None]
    started: int
    draining: asyncio.Event = field(default_factory=asyncio.Event)

    async def drain(self, hurry: asyncio.Event | None = None) -> None:
        """Starts nothing more, lets running answers end within the grace period (cut short by `hurry`), then stops them
        with their text kept, and closes the sockets. A second call changes nothing."""
        if self.draining.is_set():
            return
        self.draining.set()
        grace = self.settings.shutdown_grace_s
        if self.slot.ready:
            logger.info("shutting down: running answers get up to %g s; a second signal ends them at once", grace)
        self.engine.refuse()
        self.hub.announce_draining()
        calm: list[asyncio.Task[Any]] = [asyncio.create_task(self.engine.idle())]
        if hurry is not None:
            calm.append(asyncio.create_task(hurry.wait()))
        turns = asyncio.create_task(self.turns.close(self.settings.shutdown_grace_s))
        await asyncio.wait(calm, timeout=self.settings.shutdown_grace_s, return_when=asyncio.FIRST_COMPLETED)
        for task in calm:
            task.cancel()
        if hurry is not None and hurry.is_set():
            turns.cancel()
            await asyncio.gather(turns, return_exceptions=True)
            await self.turns.close(0)
        else:
            await turns
        await self.engine.close()
        await self.hub.close_all()


@asynccontextmanager
async def open_backend(
    settings: Settings, loader: Loader, *, timing: SocketTiming | None = None
) -> AsyncIterator[Backend]:
    """Opens the database, takes over what a predecessor left, and starts loading the engine in the background.

    Raises CommandFailed when the database cannot be used. The end of the block drains and closes everything.
    """
    store = await open_store(settings)
    slot, metrics, tasks = EngineSlot(), Metrics(), Tasks()
    engine = ObservedEngine(slot, metrics)

    def look() -> EngineSnapshot | None:
        return slot.snapshot() if slot.ready else None

    def check(params: SamplingParams) -> None:
        if slot.ready:
            with suppress(QueueFull, EngineStopped):
                slot.check(1, params)

    metrics.registry.register(EngineCollector(look))
    turns = TurnService(store, engine, MemoryBroker(keep_s=settings.event_log_ttl_s))
    sessions = SessionService(store, turns, tuple(adapter.name for adapter in settings.adapter), check)
    try:
        await turns.recover()
        backend = Backend(
            settings=settings,
            store=store,
            slot=slot,
            engine=engine,
            turns=turns,
            sessions=sessions,
            metrics=metrics,
            hub=Hub(turns, sessions, timing or SocketTiming()),
            tasks=tasks,
            loading=tasks.start(slot.load(loader)),
            started=int(time.time()),
        )
        try:
            yield backend
        finally:
            await backend.drain()
            await tasks.cancel()
    finally:
        await store.close()
