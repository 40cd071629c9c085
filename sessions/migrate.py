"""Brings a database to the newest schema, step by step, with the revisions of the package `migrations`."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text
from sqlalchemy.ext.asyncio import AsyncEngine

from migrations import NEWEST
from sessions.errors import StorageUnusable
from sessions.models import Base

if TYPE_CHECKING:
    from alembic.config import Config

_ADVISORY_KEY = 0x63686174_6D696772
"""Of PostgreSQL's advisory lock while migrating: two processes that start together migrate once."""


def alembic_config(connection: Connection) -> Config:
    """Alembic's configuration for this connection; what alembic.ini would say elsewhere."""
    from alembic.config import Config

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


def current_revision(connection: Connection) -> str | None:
    """That of the last step that the database has taken; None before the first."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
    return revision


def _upgrade(connection: Connection) -> None:
    if current_revision(connection) == NEWEST:
        return
    from alembic import command  # loading Alembic takes a tenth of a second, which most starts do without
    from alembic.util import CommandError

    try:
        command.upgrade(alembic_config(connection), "head")
    except CommandError as error:
        raise StorageUnusable(f"the database's schema does not fit this version of chatd: {error}") from error
