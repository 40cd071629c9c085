"""Saves what running turns have written so far, all of them in one transaction, so that a crash loses little."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from sessions.running_turn import RunningTurn
from sessions.store import Store
from sessions.turn_queries import save_replies

logger = logging.getLogger(__name__)


class Autosave:
    """Saves every `interval_s` seconds from `start` to `stop`; `running` is the live table of turns, by generation."""

    def __init__(self, store: Store, running: Mapping[str, RunningTurn], interval_s: float) -> None:
        self._store = store
        self._running = running
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._loop(), name="autosave")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def save(self) -> None:
        """Saves every turn that has unsaved text. Raises StorageBusy, and then nothing is lost: the next one has it."""
        turns = [turn for turn in self._running.values() if turn.unsaved and not turn.deleted]
        replies = [turn.so_far() for turn in turns]
        if replies:
            async with self._store.write() as db:
                await save_replies(db, replies)
            for turn, reply in zip(turns, replies, strict=True):
                turn.saved(reply)

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.save()
            except Exception as error:
                logger.warning("running replies could not be saved and stay in memory: %s", error)
