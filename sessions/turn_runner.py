"""Carries a running turn to its end: engine events into the log, the end into the database, then the last event."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from engine.api import Admitted, Delta, Event, Failed, Finished, Progress, Queued
from sessions.broker import Broker, SessionEvent
from sessions.running_turn import Outcome, RunningTurn
from sessions.store import Store
from sessions.turn_end import TurnEnd
from sessions.turn_queries import finish_turn
from sessions.wire import Json, timings_json, usage_json

logger = logging.getLogger(__name__)


class TurnRunner:
    """first_retry, last_retry: seconds between attempts to save the end of a turn, doubling from one to the other."""

    def __init__(
        self,
        store: Store,
        broker: Broker,
        first_retry: float,
        last_retry: float,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._store = store
        self._broker = broker
        self._first_retry = first_retry
        self._last_retry = last_retry
        self._sleep = sleep

    async def run(self, running: RunningTurn, events: AsyncIterator[Event]) -> None:
        """Ends with the turn. Cancelled while the engine writes, it ends the turn as `interrupted` and saves it."""
        outcome: Outcome
        try:
            outcome = await self._consume(running, events)
        except asyncio.CancelledError:
            outcome = "interrupted"
        except Exception as error:
            logger.exception("generation %s broke", running.turn.generation.id)
            outcome = Failed(running.turn.generation.id, "internal_error", type(error).__name__)
        running.ending = True
        end = running.end(outcome)
        await self._save(running, end)
        if not running.deleted:
            await self._announce(end)

    async def _consume(self, running: RunningTurn, events: AsyncIterator[Event]) -> Outcome:
        turn, gid = running.turn, running.turn.generation.id
        async for event in events:
            if isinstance(event, Finished | Failed):
                return event
            if running.deleted:
                continue
            match event:
                case Queued():
                    pass
                case Admitted(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens):
                    running.status = "running"
                    started = {
                        "message_id": turn.reply.id,
                        "prompt_tokens": prompt_tokens,
                        "cached_tokens": cached_tokens,
                    }
                    await self._broker.append(gid, "generation.started", started)
                case Progress(processed=processed, total=total, cached=cached):
                    counts = {"processed": processed, "total": total, "cached": cached}
                    notice = SessionEvent("generation.progress", turn.message.session_id, gid, counts)
                    await self._broker.publish(notice)
                case Delta():
                    offset = running.length
                    if text := running.take(event):
                        await self._broker.append(gid, "generation.delta", {"text": text, "offset": offset})
        raise RuntimeError("the engine's events ended without a terminal one")

    async def _save(self, running: RunningTurn, end: TurnEnd) -> None:
        """Tries until it is done; meanwhile the text lives in memory and in the log. Cancelled, tries a last time."""
        try:
            await self._save_with_patience(running, end)
        except asyncio.CancelledError:
            try:
                await self._write(end)
            except Exception as error:
                unsaved, reply_id = running.unsaved, end.turn.reply.id
                logger.error("the last %d characters of reply %s were not saved: %s", unsaved, reply_id, error)
                raise

    async def _save_with_patience(self, running: RunningTurn, end: TurnEnd) -> None:
        pause = self._first_retry
        while not running.deleted:
            try:
                await self._write(end)
                return
            except Exception as error:
                logger.warning("reply %s could not be saved, next try in %.1f s: %s", end.turn.reply.id, pause, error)
            await self._sleep(pause)
            pause = min(2 * pause, self._last_retry)

    async def _write(self, end: TurnEnd) -> None:
        async with self._store.write() as db:
            await finish_turn(db, end)

    async def _announce(self, end: TurnEnd) -> None:
        gid = end.turn.generation.id
        if end.failure is not None:
            failed = {"message_id": end.turn.reply.id, "code": end.failure.code, "message": end.failure.message}
            await self._broker.append(gid, "generation.failed", failed)
        else:
            await self._broker.append(gid, "generation.done", done_data(end))


def done_data(end: TurnEnd) -> Json:
    return {
        "message_id": end.turn.reply.id,
        "status": end.message_status,
        "finish_reason": end.finish_reason,
        "usage": usage_json(end.usage),
        "timings": timings_json(end.timings),
    }
