"""chatd chat: a conversation in the terminal, over the WebSocket."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from chatd.failure import CommandFailed

if TYPE_CHECKING:
    from argparse import _SubParsersAction

HELP = "talk to a running server"
DEFAULT_URL = "http://127.0.0.1:8000"


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "chat",
        help=HELP,
        description="Talk to a running server. Each line is a message. Ctrl-C stops the running answer; "
        "Ctrl-C without one, or Ctrl-D, leaves. Lines may also be piped in.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--url",
        default=os.environ.get("CHATD_URL", DEFAULT_URL),
        help=f"address of the server (default: CHATD_URL, else {DEFAULT_URL})",
    )
    parser.add_argument("--session", metavar="ID", help="go on with this session (default: a new one)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from chatd.terminal.client import ChatClient, ConnectionLost, Refused
    from chatd.terminal.interrupts import Interrupts
    from chatd.terminal.prompt import read_lines

    try:
        with Interrupts() as interrupts, ChatClient.connect(arguments.url, arguments.session) as client:
            print(f"session {client.session_id}", file=sys.stderr, flush=True)
            for line in read_lines(interrupts):
                try:
                    client.ask(line, interrupts, sys.stdout)
                except Refused as error:
                    print(f"chatd: {error}", file=sys.stderr, flush=True)
                if interrupts.leaving:
                    break
    except (ConnectionLost, Refused) as error:
        raise CommandFailed(str(error)) from error
    return 0
