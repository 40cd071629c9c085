"""Every contract test runs on SQLite and on PostgreSQL, each time on an empty database."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy.engine import URL, make_url

from tests.sessions.rig import Rig
from tests.sessions.scripted_engine import ScriptedEngine

DEFAULT_POSTGRES = "postgresql+asyncpg://postgres@127.0.0.1:5432/postgres"


async def connect_postgres(url: URL) -> asyncpg.Connection:
    try:
        return await asyncpg.connect(url.set(drivername="postgresql").render_as_string(hide_password=False))
    except OSError as error:
        reason = f"no PostgreSQL at {url.host}:{url.port} (set CHATD_TEST_DATABASE_URL): {error}"
        if os.environ.get("CHATD_TEST_REQUIRE_SERVICES") == "1":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def postgres_database() -> Iterator[URL]:
    """A database that lives as long as the test run; commits need not reach the disk."""
    server = make_url(os.environ.get("CHATD_TEST_DATABASE_URL", DEFAULT_POSTGRES))
    name = f"chatd_test_{uuid.uuid4().hex}"

    async def run(*statements: str) -> None:
        admin = await connect_postgres(server)
        for statement in statements:
            await admin.execute(statement)
        await admin.close()

    create = f'CREATE DATABASE "{name}" TEMPLATE template0'
    asyncio.run(run(create, f'ALTER DATABASE "{name}" SET synchronous_commit TO off'))
    yield server.set(database=name)
    asyncio.run(run(f'DROP DATABASE "{name}" WITH (FORCE)'))


@pytest.fixture
async def postgres_url(postgres_database: URL) -> str:
    """The database, emptied, and nobody else in it."""
    admin = await connect_postgres(postgres_database)
    others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
    await admin.execute(f"{others} AND pid <> pg_backend_pid()")
    await admin.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    await admin.close()
    return postgres_database.render_as_string(hide_password=False)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite+aiosqlite:///{tmp_path}/data/chatd.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url"))


@pytest.fixture
async def open_rig(database_url: str) -> AsyncIterator[Callable[..., Any]]:
    opened: list[Rig] = []

    async def open_one(engine: ScriptedEngine | None = None, **fields: Any) -> Rig:
        opened.append(await Rig.open(database_url, engine, **fields))
        return opened[-1]

    yield open_one
    for rig in opened:
        await rig.close()


@pytest.fixture
async def rig(open_rig: Callable[..., Any]) -> Rig:
    opened: Rig = await open_rig()
    return opened
