"""The opened database, where transactions come from; what they read and write stands in the *_queries modules."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from datetime import datetime
from typing import Protocol

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from sessions.clock import Clock, utc_now
from sessions.errors import StorageUnusable
from sessions.ids import IdFactory
from sessions.migrate import migrate
from sessions.postgres import lock_schema, postgres_engine
from sessions.sqlite import BEGIN_OPTION, check_path, lock_file, sqlite_engine
from sessions.storage_errors import storage_errors


class StorageLock(Protocol):
    """Keeps other processes away from the database."""

    async def release(self) -> None: ...


class Store:
    """One process's hold on its database. Made by `Store.open`, given back by `close`."""

    def __init__(self, engine: AsyncEngine, lock: StorageLock, clock: Clock) -> None:
        sqlite = engine.dialect.name == "sqlite"
        reads = {BEGIN_OPTION: ""} if sqlite else {"isolation_level": "REPEATABLE READ"}
        writes = {BEGIN_OPTION: "IMMEDIATE"} if sqlite else {"isolation_level": "READ COMMITTED"}
        self._engine = engine
        self._lock = lock
        self._clock = clock
        self._reads = async_sessionmaker(engine.execution_options(**reads), expire_on_commit=False)
        self._writes = async_sessionmaker(engine.execution_options(**writes), expire_on_commit=False)
        self._one_writer: AbstractAsyncContextManager[None] = asyncio.Lock() if sqlite else nullcontext()
        self.ids = IdFactory(clock)

    @classmethod
    async def open(cls, database_url: str, *, clock: Clock = utc_now, busy_timeout_ms: int = 5000) -> Store:
        """Opens `sqlite+aiosqlite:///path` or `postgresql+asyncpg://...`, alone, and migrates it to the newest schema.

        busy_timeout_ms: how long SQLite waits for a lock before StorageBusy.
        Raises StorageUnusable, StorageInUse, StorageBusy.
        """
        try:
            url = make_url(database_url)
        except ArgumentError:
            raise StorageUnusable("the database URL cannot be read") from None
        if url.drivername == "sqlite+aiosqlite":
            check_path(url)
            engine = sqlite_engine(url, busy_timeout_ms)
        elif url.drivername == "postgresql+asyncpg":
            engine = postgres_engine(url)
        else:
            raise StorageUnusable("a database URL is sqlite:///path or postgresql://user@host/name")
        async with AsyncExitStack() as undo:
            undo.push_async_callback(engine.dispose)
            with storage_errors():
                lock: StorageLock = await lock_schema(engine) if engine.name == "postgresql" else lock_file(url)
                undo.push_async_callback(lock.release)
                await migrate(engine.execution_options(**{BEGIN_OPTION: "IMMEDIATE"}))
            undo.pop_all()
        return cls(engine, lock, clock)

    @property
    def engine(self) -> AsyncEngine:
        return self._engine

    def now(self) -> datetime:
        return self._clock()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """A read transaction that sees one state of the database throughout. Raises StorageBusy."""
        with storage_errors():
            async with self._reads.begin() as db:
                yield db

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """A write transaction, committed at the end of the block. Keep it short. Raises StorageBusy."""
        async with self._one_writer:
            with storage_errors():
                async with self._writes.begin() as db:
                    yield db

    async def ping(self) -> None:
        """Raises StorageBusy when the database does not answer."""
        async with self.read() as db:
            await (await db.connection()).exec_driver_sql("SELECT 1")

    async def close(self) -> None:
        await self._lock.release()
        await self._engine.dispose()
