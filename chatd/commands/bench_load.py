"""What the commands that put a server under load share: which server, and where the report goes."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chatd.commands.arguments import api_key, new_file, server_url
from chatd.commands.options import add_settings, flags_of, settings_of
from chatd.failure import CommandFailed
from chatd.settings import Settings, SettingsError
from engine.config import EngineConfig

if TYPE_CHECKING:
    from chatd.bench.client import ChatClient
    from chatd.bench.report import Report

ENGINE_SETTINGS = tuple(
    name for name in Settings.model_fields if name in {"adapter", *(field.name for field in fields(EngineConfig))}
)
"""The settings that a server of the benchmark's own is started with."""


def add_target(parser: argparse.ArgumentParser) -> None:
    """--url for a running server, or the settings of one of its own."""
    parser.add_argument(
        "--url",
        type=server_url,
        help="a running server that speaks the OpenAI protocol; --model is then the name to ask for, by default the "
        "first that it lists, and other settings are refused (default: a server of its own, fresh, ended afterwards)",
    )
    parser.add_argument("--api-key", type=api_key, metavar="KEY", help="for --url, sent as a bearer token")
    add_settings(parser, ENGINE_SETTINGS)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write all figures and every request there")
    parser.add_argument("--markdown", type=new_file, metavar="FILE", help="write the report there too")


@dataclass(frozen=True, slots=True)
class Target:
    """The server at `url`, or, without it, a fresh one with these flags of `chatd serve`."""

    url: str | None
    model: str | None = None
    api_key: str | None = None
    flags: Sequence[str] = ()

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Target:
        """Raises SettingsError for what does not belong together."""
        if arguments.url is None:
            if arguments.api_key is not None:
                raise SettingsError("--api-key: only with --url")
            return cls(None, flags=flags_of(settings_of(arguments), ENGINE_SETTINGS))
        foreign = [name for name in (*ENGINE_SETTINGS, "config") if name != "model"]
        given = [name for name in foreign if getattr(arguments, name) is not None]
        if given:
            raise SettingsError(f"--{given[0].replace('_', '-')}: only without --url, for a server of its own")
        return cls(arguments.url, arguments.model, arguments.api_key)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ChatClient]:
        """A client of the server, which has answered once. Raises CommandFailed."""
        from chatd.bench.client import connect
        from chatd.bench.server import own_server

        if self.url is not None:
            async with connect(self.url, model=self.model, api_key=self.api_key) as client:
                yield client
        else:
            async with own_server(self.flags) as url, connect(url) as client:
                yield client


def run_load(work: Coroutine[Any, Any, None]) -> bool:
    """True when a signal ended it early."""
    from chatd.bench.load import until_interrupted

    return asyncio.run(until_interrupted(work))


def publish(report: Report, arguments: argparse.Namespace, interrupted: bool) -> int:
    """Shows and writes it, and gives the exit status. Raises CommandFailed when there is no answer at all."""
    from chatd.bench.load import answers_of, errors_of

    if not answers_of(report.rows):
        if interrupted:
            return 130
        (text, _), *_ = errors_of(report.rows).most_common()
        raise CommandFailed(f"all {len(report.rows)} requests failed: {text}")
    text = report.markdown(interrupted)
    sys.stdout.write(text)
    sys.stdout.flush()
    if arguments.markdown is not None:
        write(arguments.markdown, text)
    if arguments.json is not None:
        write(arguments.json, report.json(interrupted))
    return 130 if interrupted else 0


def write(path: Path, text: str) -> None:
    """Raises CommandFailed."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror}") from error
