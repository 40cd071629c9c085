"""chatd db: looks at and migrates the database."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine

from chatd.commands.options import add_settings, settings_of
from chatd.failure import CommandFailed
from chatd.storage import open_store, plain_url
from sessions.migrate import alembic_config

if TYPE_CHECKING:
    from argparse import _SubParsersAction

HELP = "look at or migrate the database"


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("db", help=HELP, description=HELP, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    for name, text, action in (
        ("upgrade", "migrate to the newest schema", upgrade),
        ("current", "show the schema's revision", current),
    ):
        one = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        add_settings(one, ("data_dir", "database_url"))
        one.set_defaults(run=action)


def upgrade(arguments: argparse.Namespace) -> int:
    settings = settings_of(arguments)

    async def migrate() -> None:
        store = await open_store(settings)
        await store.close()

    asyncio.run(migrate())
    return current(arguments)


def current(arguments: argparse.Namespace) -> int:
    url = settings_of(arguments).sqlalchemy_url
    parsed = make_url(url)
    if parsed.drivername.startswith("sqlite") and not Path(parsed.database or "").exists():
        print("no database yet")
        return 0
    try:
        found, newest = asyncio.run(_revisions(url))
    except (SQLAlchemyError, OSError) as error:
        raise CommandFailed(f"the database at {plain_url(url)} cannot be read: {type(error).__name__}") from error
    print(f"{found or 'no schema'}{' (newest)' if found == newest else f', newest is {newest}'}")
    return 0


async def _revisions(url: str) -> tuple[str | None, str | None]:
    engine = create_async_engine(url)
    try:
        async with engine.connect() as connection:
            return await connection.run_sync(_read_revisions)
    finally:
        await engine.dispose()


def _read_revisions(connection: Connection) -> tuple[str | None, str | None]:
    scripts = ScriptDirectory.from_config(alembic_config(connection))
    return MigrationContext.configure(connection).get_current_revision(), scripts.get_current_head()
