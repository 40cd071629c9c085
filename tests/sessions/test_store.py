"""The opened database: transactions, locks, who else may use it, and its schema."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, select, text, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import IntegrityError

from migrations import NEWEST
from sessions import StorageBusy, StorageInUse, StorageUnusable, Store
from sessions.migrate import alembic_config, current_revision
from sessions.models import Base, GenerationRow, MessageRow, SessionRow
from tests.sessions.rig import OWNER, Rig

OpenRig = Callable[..., Awaitable[Rig]]


async def test_the_schema_is_what_the_models_say(rig: Rig) -> None:
    def differences(connection: Connection) -> list[object]:
        command.check(alembic_config(connection))
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, Base.metadata))

    async with rig.store.engine.connect() as connection:
        assert await connection.run_sync(differences) == []


async def test_the_newest_revision_is_the_last_step(rig: Rig) -> None:
    def revisions(connection: Connection) -> tuple[str | None, str | None]:
        return ScriptDirectory.from_config(alembic_config(connection)).get_current_head(), current_revision(connection)

    async with rig.store.engine.connect() as connection:
        assert await connection.run_sync(revisions) == (NEWEST, NEWEST)


async def test_the_schema_goes_down_and_up_again(rig: Rig) -> None:
    def down_and_up(connection: Connection) -> list[str]:
        command.downgrade(alembic_config(connection), "base")
        assert current_revision(connection) is None
        left = inspect(connection).get_table_names()
        command.upgrade(alembic_config(connection), "head")
        return left

    async with rig.store.write() as db:
        assert await (await db.connection()).run_sync(down_and_up) == ["alembic_version"]
    await rig.ask(await rig.session(), "works")


async def test_opening_again_keeps_everything(open_rig: OpenRig) -> None:
    rig = await open_rig()
    session = await rig.session()
    await rig.ask(session, "hello", "there")
    await rig.close()
    rig = await open_rig()
    assert await rig.texts(session) == [("user", "hello", "complete"), ("assistant", "there", "complete")]


async def test_a_schema_that_is_the_newest_is_not_migrated(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await open_rig()
    await rig.close()
    monkeypatch.setattr(command, "upgrade", lambda *_: pytest.fail("migrated"))
    rig = await open_rig()
    await rig.store.ping()


async def test_a_schema_of_a_newer_program_is_refused(open_rig: OpenRig, database_url: str) -> None:
    rig = await open_rig()
    async with rig.store.write() as db:
        await db.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    await rig.close()
    with pytest.raises(StorageUnusable, match="9999"):
        await Store.open(database_url)


async def test_one_process_at_a_time(open_rig: OpenRig, database_url: str) -> None:
    rig = await open_rig()
    with pytest.raises(StorageInUse):
        await Store.open(database_url)
    await rig.close()
    await (await open_rig()).close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        "sqlite+aiosqlite://",
        "sqlite+aiosqlite:///:memory:",
        "sqlite+aiosqlite:///file:x?uri=true",
        "sqlite:///x.db",
        "mysql+aiomysql://x/y",
    ],
)
async def test_a_url_that_cannot_serve_is_refused(url: str) -> None:
    with pytest.raises(StorageUnusable):
        await Store.open(url)


async def test_a_server_that_is_away_is_busy() -> None:
    with pytest.raises(StorageBusy):
        await Store.open("postgresql+asyncpg://postgres@127.0.0.1:1/postgres")


async def test_sqlite_is_set_up_for_a_server(sqlite_url: str) -> None:
    store = await Store.open(sqlite_url)
    pragmas = {}
    async with store.read() as db:
        for name in ("journal_mode", "busy_timeout", "foreign_keys"):
            pragmas[name] = await db.scalar(text(f"PRAGMA {name}"))
    assert pragmas == {"journal_mode": "wal", "busy_timeout": 5000, "foreign_keys": 1}
    await store.close()


async def test_a_locked_database_is_busy_and_nothing_is_lost(sqlite_url: str) -> None:
    rig = await Rig.open(sqlite_url, busy_timeout_ms=10)
    session = await rig.session()
    other = await rig.session()
    turn = await rig.send(session, "hello")
    intruder = sqlite3.connect(str(make_url(sqlite_url).database), isolation_level=None)
    intruder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageBusy):
        await rig.send(other, "hello")
    with pytest.raises(StorageBusy):
        await rig.session()
    assert len((await rig.sessions.list(OWNER)).data) == 2
    rig.engine.latest.say("kept")
    await rig.heard(turn, "kept")
    with pytest.raises(StorageBusy):
        await rig.turns.save_now()
    rig.engine.latest.finish()
    reader = asyncio.create_task(rig.log(turn))
    intruder.execute("ROLLBACK")
    intruder.close()
    assert (await reader)[-1].type == "generation.done"
    assert (await rig.texts(session))[-1] == ("assistant", "kept", "complete")
    assert await rig.sessions.messages(OWNER, other.id) == []
    await rig.close()


async def test_a_read_sees_one_state_though_somebody_writes(rig: Rig) -> None:
    session = await rig.session()
    titles = select(SessionRow.title).where(SessionRow.id == session.id)
    async with rig.store.read() as reading:
        seen = [await reading.scalar(titles)]
        async with rig.store.write() as writing:
            await writing.execute(update(SessionRow).values(title="new"))
        seen.append(await reading.scalar(titles))
    assert seen == [None, None]
    assert (await rig.sessions.get(OWNER, session.id)).title == "new"


async def test_a_write_that_fails_leaves_nothing(rig: Rig) -> None:
    session = await rig.session()

    async def fail() -> None:
        async with rig.store.write() as db:
            await db.execute(update(SessionRow).values(title="new"))
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    assert await rig.sessions.get(OWNER, session.id) == session


async def test_the_database_itself_refuses_two_running_turns_and_lost_parents(rig: Rig) -> None:
    session = await rig.session()
    turn = await rig.send(session, "hello")
    now = datetime(2026, 1, 1, tzinfo=UTC)
    second = GenerationRow(
        id="gen_2", session_id=session.id, message_id=turn.reply.id, status="running", created_at=now
    )
    orphan = MessageRow(
        id="msg_2",
        session_id=session.id,
        parent_id="msg_0",
        role="user",
        content="x",
        status="complete",
        created_at=now,
    )
    for row in (second, orphan):
        with pytest.raises(IntegrityError):
            async with rig.store.write() as db:
                db.add(row)


async def test_ids_are_little_endian_int32(rig: Rig) -> None:
    session = await rig.session()
    turn = await rig.ask(session, "hello", "x")
    async with rig.store.read() as db:
        raw = await db.scalar(text("SELECT ids FROM messages WHERE id = :id"), {"id": turn.reply.id})
    assert raw is not None
    assert bytes(raw) == np.asarray(rig.engine.latest.output, dtype="<i4").tobytes()


async def test_two_processes_that_migrate_at_once_do_it_once(postgres_url: str) -> None:
    results = await asyncio.gather(*(Store.open(postgres_url) for _ in range(3)), return_exceptions=True)
    opened = [result for result in results if isinstance(result, Store)]
    assert len(opened) == 1
    assert all(isinstance(result, Store | StorageInUse) for result in results)
    await opened[0].ping()
    await opened[0].close()


async def test_a_data_folder_is_made(tmp_path: Path) -> None:
    store = await Store.open(f"sqlite+aiosqlite:///{tmp_path}/a/b/chatd.db")
    await store.close()
    assert (tmp_path / "a/b/chatd.db").exists()


async def test_a_full_disk_is_busy_storage_and_passes(tmp_path: Path) -> None:
    store = await Store.open(f"sqlite+aiosqlite:///{tmp_path}/chatd.db")

    async def write(pages: int) -> None:
        async with store.write() as db:
            await db.execute(text(f"PRAGMA max_page_count = {pages}"))
            await db.execute(text("CREATE TABLE bulk AS SELECT randomblob(5000000) AS filler"))

    with pytest.raises(StorageBusy):
        await write(1)
    await write(10**6)
    await store.close()
