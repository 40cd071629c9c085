"""The command line: `chatd <command>`. Each command stands in a file of its own under commands/."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from chatd import chatd_version
from chatd.commands import bench, chat, db, pull, serve
from chatd.failure import CommandFailed
from chatd.settings import SettingsError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="chatd", description="A self-hosted backend for multi-turn chat.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"chatd {chatd_version()}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for command in (serve, chat, pull, db, bench):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit status: 0 done, 1 failed with one clear line, 2 wrong usage or settings."""
    arguments = build_parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except SettingsError as error:
        print(f"chatd: {error}".replace("\n", "\nchatd: "), file=sys.stderr)
        return 2
    except CommandFailed as error:
        print(f"chatd: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status
