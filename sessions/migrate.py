"""Brings a database to the newest schema, step by step, with the revisions of the package `migrations`."""

from __future__ import annotations

from importlib.resources import files

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncEngine

from sessions.errors import StorageUnusable
from sessions.models import Base

_ADVISORY_KEY = 0x63686174_6D696772
"""Of PostgreSQL's advisory lock while migrating: two processes that start together migrate once."""


def alembic_config(connection: Connection) -> Config:
    """Alembic's configuration for this connection; what alembic.ini would say elsewhere."""
    config = Config()
    config.set_main_option("script_location", str(files("migrations")).replace("%", "%%"))
    config.attributes["connection"] = connection
    config.attributes["metadata"] = Base.metadata
    return config


async def migrate(engine: AsyncEngine) -> None:
    """Runs all missing revisions in one transaction. Raises StorageUnusable when the schema is newer than the code."""
    async with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_KEY})
        await connection.run_sync(_upgrade)


def _upgrade(connection: Connection) -> None:
    try:
        command.upgrade(alembic_config(connection), "head")
    except CommandError as error:
        raise StorageUnusable(f"the database's schema does not fit this version of chatd: {error}") from error
