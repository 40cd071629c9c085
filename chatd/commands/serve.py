"""chatd serve: the server."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
from typing import TYPE_CHECKING

from chatd.commands.options import add_settings, settings_of
from chatd.failure import CommandFailed
from chatd.settings import Settings
from engine.errors import ModelError
from engine.openmp import spin_briefly

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from chatd.backend import Backend
    from chatd.server import ChatServer
    from engine.api import Engine

HELP = "run the server"


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help=HELP,
        description="Run the server. Flags win over CHATD_* variables, which win over the TOML file.",
        allow_abbrev=False,
    )
    add_settings(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    settings = settings_of(arguments)
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for noisy in ("alembic", "uvicorn"):
        logging.getLogger(noisy).setLevel("WARNING")
    gc.disable()  # what is loaded stays; looking through it again and again takes half a second of the start
    try:
        asyncio.run(serve(settings))
    finally:
        gc.enable()
    return 0


async def serve(settings: Settings) -> None:
    """Runs until a signal comes. Raises CommandFailed when the port, the data folder or the model cannot be used."""
    from chatd.app import create_app
    from chatd.backend import open_backend
    from chatd.server import ChatServer, bind, url_of

    def load() -> Engine:
        spin_briefly()
        from engine.loading import load_engine  # loads torch: not before the server answers

        engine = load_engine(settings.engine_config())
        gc.freeze()  # nor is it looked through between two tokens
        gc.enable()
        return engine

    with bind(settings.host, settings.port) as listening:
        async with open_backend(settings, load) as backend:
            server = ChatServer(create_app(backend), backend)
            watching = asyncio.create_task(_announce(backend, server, url_of(listening)))
            await server.serve(sockets=[listening])
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            if backend.slot.failure is not None:
                raise _failed(settings, backend.slot.failure)


async def _announce(backend: Backend, server: ChatServer, url: str) -> None:
    """Says where the server is once it can answer; stops it when the model cannot be loaded."""
    try:
        await backend.loading
    except Exception:
        server.stop()
        return
    info = backend.engine.info
    print(
        f"chatd is ready at {url} ({backend.settings.model_name}, context {info.context_length} tokens, "
        f"cache {info.pool_tokens} tokens, {info.pool_bytes / 2**20:.0f} MiB)",
        flush=True,
    )


def _failed(settings: Settings, error: BaseException) -> CommandFailed:
    if isinstance(error, ModelError):
        return CommandFailed(str(error))
    logging.getLogger(__name__).debug("loading failed", exc_info=error)
    return CommandFailed(
        f"the model {settings.model} cannot be loaded: {type(error).__name__}: {error}".splitlines()[0]
    )
