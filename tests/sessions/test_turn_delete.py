"""Deleting a session while its turn runs: it stops, and nothing comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from sqlalchemy import func, select

from sessions import LogGone, NotFound, TurnSettings
from sessions.models import GenerationRow, MessageRow, SessionRow
from tests.sessions.rig import OWNER, Rig

OpenRig = Callable[..., Awaitable[Rig]]


async def rows(rig: Rig) -> list[int]:
    async with rig.store.read() as db:
        tables = (SessionRow, MessageRow, GenerationRow)
        return [await db.scalar(select(func.count()).select_from(table)) or 0 for table in tables]


@pytest.mark.parametrize("obeys", [True, False], ids=["an engine that obeys", "an engine that goes on"])
async def test_delete_in_mid_turn(open_rig: OpenRig, obeys: bool) -> None:
    rig = await open_rig(settings=TurnSettings(save_interval=3600, stop_wait=5 if obeys else 0.05, first_retry=0))
    rig.engine.obeys_abort = obeys
    session = await rig.session()
    notices = rig.broker.subscribe(session.id)
    turn = await rig.send(session, "hello")
    live = rig.engine.latest
    live.say("some text")
    await rig.heard(turn, "some text")
    reader = asyncio.create_task(rig.log(turn))
    await rig.sessions.delete(OWNER, session.id)
    last = (await reader)[-1]
    assert last.terminal
    assert turn.generation.id in rig.engine.aborted
    if not obeys:
        live.say("more")
        live.finish("cancelled")
    await rig.turns.close(1)
    assert await rows(rig) == [0, 0, 0]
    types = [(await anext(notices)).type for _ in range(3)]
    assert types == ["message.created", "session.updated", "session.deleted"]
    with pytest.raises(NotFound):
        await rig.turns.events(OWNER, turn.generation.id)
    with pytest.raises(LogGone):
        await rig.broker.snapshot(turn.generation.id)


async def test_delete_races_with_the_end_and_with_a_save(rig: Rig) -> None:
    for _ in range(5):
        session = await rig.session()
        turn = await rig.send(session, "hello")
        rig.engine.latest.say("text")
        await rig.heard(turn, "text")
        rig.engine.latest.finish()
        await asyncio.gather(rig.sessions.delete(OWNER, session.id), rig.turns.save_now())
    assert await rows(rig) == [0, 0, 0]


async def test_delete_races_with_a_start(rig: Rig) -> None:
    for _ in range(5):
        session = await rig.session()
        sent, _ = await asyncio.gather(
            rig.send(session, "hello"), rig.sessions.delete(OWNER, session.id), return_exceptions=True
        )
        assert isinstance(sent, NotFound) or not isinstance(sent, BaseException)
        assert rig.turns.running(session.id) is None or rig.engine.live == {}
    await rig.turns.close(1)
    assert await rows(rig) == [0, 0, 0]


async def test_deleting_twice_is_not_found(rig: Rig) -> None:
    session = await rig.session()
    await rig.sessions.delete(OWNER, session.id)
    with pytest.raises(NotFound):
        await rig.sessions.delete(OWNER, session.id)


async def test_a_very_long_conversation_can_be_read_and_deleted(rig: Rig) -> None:
    session = await rig.session()
    now = rig.store.now()
    ids = [f"msg_{n:04}" for n in range(2500)]
    async with rig.store.write() as db:
        for place, id in enumerate(ids):
            parent = ids[place - 1] if place else None
            role = "assistant" if place % 2 else "user"
            db.add(
                MessageRow(
                    id=id,
                    session_id=session.id,
                    parent_id=parent,
                    role=role,
                    content="x",
                    status="complete",
                    created_at=now,
                )
            )
            if place % 500 == 0:
                await db.flush()
        await db.flush()
        row = await db.get(SessionRow, session.id)
        assert row is not None
        row.active_leaf = ids[-1]
    assert [message.id for message in await rig.sessions.messages(OWNER, session.id)] == ids
    await rig.sessions.delete(OWNER, session.id)
    assert await rows(rig) == [0, 0, 0]
