"""Opening the database with errors that a person at a terminal understands."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine

from chatd.failure import CommandFailed
from chatd.settings import Settings
from sessions import SessionsError, Store
from sessions.migrate import current_revision


def plain_url(url: str) -> str:
    """The URL as it may be shown: without a password."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "the given URL"


async def open_store(settings: Settings) -> Store:
    """Makes the data folder, opens the database and migrates it. Raises CommandFailed."""
    url = settings.sqlalchemy_url
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandFailed(f"the data folder {settings.data_dir} cannot be used: {error.strerror}") from error
    try:
        return await Store.open(url)
    except SessionsError as error:
        cause = f": {error.__cause__}".splitlines()[0] if error.__cause__ is not None else ""
        raise CommandFailed(f"{error} ({plain_url(url)}){cause}") from error
    except OSError as error:
        raise CommandFailed(f"the database {plain_url(url)} cannot be used: {error.strerror}") from error
    except SQLAlchemyError as error:
        cause = str(getattr(error, "orig", None) or error).splitlines()[0]
        raise CommandFailed(f"the database {plain_url(url)} cannot be used: {cause}") from error


def is_there(url: str) -> bool:
    """False where the database is a file that does not exist yet."""
    parsed = make_url(url)
    return not parsed.drivername.startswith("sqlite") or Path(parsed.database or "").exists()


async def read_revision(url: str) -> str | None:
    """The schema's revision, None without a schema; changes nothing. Raises CommandFailed."""
    engine = create_async_engine(url)
    try:
        async with engine.connect() as connection:
            return await connection.run_sync(current_revision)
    except (SQLAlchemyError, OSError) as error:
        raise CommandFailed(f"the database at {plain_url(url)} cannot be read: {type(error).__name__}") from error
    finally:
        await engine.dispose()
