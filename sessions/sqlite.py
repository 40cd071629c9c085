"""SQLite: WAL, one writer at a time, and one process per database file."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from sessions.errors import StorageInUse, StorageUnusable

BEGIN_OPTION = "sqlite_begin"
"""Execution option that names the kind of transaction: "" (deferred, for reads) or "IMMEDIATE" (for writes)."""


class FileLock:
    """An exclusive lock on `path`, held until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise StorageInUse(str(path.parent)) from None

    async def release(self) -> None:
        os.close(self._file)


def check_path(url: URL) -> None:
    """Raises StorageUnusable unless the URL names a plain file."""
    if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
        raise StorageUnusable("SQLite needs a plain file path: sqlite+aiosqlite:///path/to/chatd.db")


def lock_file(url: URL) -> FileLock:
    """Takes `<file>.lock` beside the database, making the folder first. Raises StorageInUse."""
    path = Path(str(url.database))
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path.with_name(path.name + ".lock"))


def sqlite_engine(url: URL, busy_timeout_ms: int) -> AsyncEngine:
    engine = create_async_engine(url)

    @event.listens_for(engine.sync_engine, "connect")
    def prepare(connection: Any, _record: object) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {busy_timeout_ms}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql(f"BEGIN {connection.get_execution_options().get(BEGIN_OPTION, '')}")

    return engine
