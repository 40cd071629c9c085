"""A process that dies in mid-turn, for real: the next one keeps the text that was saved, and goes on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from sessions import LogGone, StorageInUse, Store
from sessions.session_queries import message_path
from tests.sessions.rig import OWNER, Rig

OpenRig = Callable[..., Awaitable[Rig]]
ROOT = Path(__file__).parents[2]


@pytest.fixture
async def child(database_url: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, str]]:
    """A server process in the middle of a turn, with its session and generation."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.sessions.crash_child", database_url, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    session_id, generation_id = (await process.stdout.readline()).decode().split()
    yield process, session_id, generation_id
    if process.returncode is None:
        process.kill()
        await process.wait()


async def test_a_crash_and_what_the_next_process_finds(
    child: tuple[asyncio.subprocess.Process, str, str], database_url: str, open_rig: OpenRig
) -> None:
    process, session_id, generation_id = child
    with pytest.raises(StorageInUse, match="in use by another process"):
        await Store.open(database_url)
    process.kill()
    await process.wait()
    rig = await open_rig()
    assert await rig.turns.recover() == 1
    assert await rig.turns.recover() == 0
    session = await rig.sessions.get(OWNER, session_id)
    assert await rig.texts(session) == [
        ("user", "first", "complete"),
        ("assistant", "whole", "complete"),
        ("user", "second", "complete"),
        ("assistant", "saved ", "interrupted"),
    ]
    generation = await rig.turns.generation(OWNER, generation_id)
    assert (generation.status, generation.finish_reason) == ("interrupted", None)
    with pytest.raises(LogGone):
        await rig.turns.events(OWNER, generation_id)
    async with rig.store.read() as db:
        encoded = (await message_path(db, session_id, session.active_leaf))[-1].encoded
    assert encoded is not None
    assert rig.engine.codec.decode(encoded.ids) == "saved "
    await rig.send(session, "third")
    text = rig.engine.codec.decode(rig.engine.latest.request.tokens)
    assert text.endswith("user\nsecond\nassistant\nsaved \nuser\nthird\nassistant\n")
    assert rig.engine.codec.encoded == ["third"]
