"""PostgreSQL: one process per schema, held by an advisory lock on a connection of its own."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from sessions.errors import StorageInUse

_LOCK_CLASS = 0x63686174
"""First half of the advisory lock's key ("chat"); the second is the schema's hash."""
_LOCK_WAIT_MS = 2000
_LOCK_NOT_AVAILABLE = "55P03"


class SchemaLock:
    """Held as long as its connection lives; a process that dies lets go of it."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def take(self, database: str) -> None:
        await self._connection.execution_options(isolation_level="AUTOCOMMIT")
        await self._connection.exec_driver_sql(f"SET lock_timeout = {_LOCK_WAIT_MS}")
        key = text("SELECT pg_advisory_lock(:class, hashtext(current_schema()))")
        try:
            await self._connection.execute(key, {"class": _LOCK_CLASS})
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) == _LOCK_NOT_AVAILABLE:
                raise StorageInUse(f"the database {database}") from None
            raise

    async def release(self) -> None:
        await self._connection.invalidate()
        await self._connection.close()


def postgres_engine(url: URL) -> AsyncEngine:
    return create_async_engine(url, pool_pre_ping=True)


async def lock_schema(engine: AsyncEngine) -> SchemaLock:
    """Raises StorageInUse when another process holds the schema for more than two seconds: one that has just died
    may take a moment to disappear."""
    lock = SchemaLock(await engine.connect())
    try:
        await lock.take(str(engine.url.database))
    except BaseException:
        await lock.release()
        raise
    return lock
