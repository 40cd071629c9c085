"""Which database errors mean "try again": a lock held too long, a full disk, a server that is away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from sessions.errors import StorageBusy

_SQLITE_PASSING = (5, 6, 8, 10, 13)
"""SQLite's primary result codes: busy, locked, read-only, I/O error, disk full."""

_POSTGRES_BUSY = ("08", "40001", "40P01", "53", "55P03", "57P")
"""Prefixes of SQLSTATE: connection lost, serialization, deadlock, out of resources, lock timeout, shutdown."""


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turns passing database troubles into StorageBusy; everything else goes on as it is."""
    try:
        yield
    except DBAPIError as error:
        if _passing(error):
            raise StorageBusy from error
        raise
    except (PoolTimeout, ConnectionError, TimeoutError) as error:
        raise StorageBusy from error


def _passing(error: DBAPIError) -> bool:
    if error.connection_invalidated:
        return True
    cause: BaseException | None = error.orig
    while cause is not None:
        if getattr(cause, "sqlite_errorcode", 0) & 0xFF in _SQLITE_PASSING:
            return True
        if (getattr(cause, "sqlstate", None) or "").startswith(_POSTGRES_BUSY):
            return True
        cause = cause.__cause__
    return False
