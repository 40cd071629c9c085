"""chatd db: looks at and migrates the database."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

from chatd.commands.options import add_settings, settings_of
from migrations import NEWEST

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
    from chatd.storage import open_store  # loads SQLAlchemy, which other commands do without

    async def migrate() -> None:
        store = await open_store(settings)
        await store.close()

    asyncio.run(migrate())
    return current(arguments)


def current(arguments: argparse.Namespace) -> int:
    settings = settings_of(arguments)
    from chatd.storage import is_there, read_revision

    url = settings.sqlalchemy_url
    if not is_there(url):
        print("no database yet")
        return 0
    found = asyncio.run(read_revision(url))
    print(f"{found or 'no schema'}{' (newest)' if found == NEWEST else f', newest is {NEWEST}'}")
    return 0
