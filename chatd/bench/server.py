"""A `chatd serve` of the benchmark's own: fresh, on a free port, with a database that is thrown away."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from chatd.failure import CommandFailed
from chatd.settings import PREFIX

_START_S = 900.0
_END_S = 20.0
_LOG_LINES = 40


@asynccontextmanager
async def own_server(options: Sequence[str]) -> AsyncIterator[str]:
    """Its URL, once it is ready. options: flags of `chatd serve`; neither variables nor a file say anything else.

    It is ended whatever happens here. Raises CommandFailed when it does not start; its log is then on stderr.
    """
    with TemporaryDirectory(prefix="chatd-bench-") as folder:
        log = Path(folder) / "server.log"
        command = [sys.executable, "-m", "chatd", "serve", "--host", "127.0.0.1", "--port", "0", "--data-dir", folder]
        command += ["--database-url", f"sqlite:///{folder}/chatd.db", "--shutdown-grace-s", "0", *options]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        with log.open("wb") as stderr:
            # A session of its own: Ctrl-C is for this process, which then ends the server.
            process = await asyncio.create_subprocess_exec(
                *command, stdin=DEVNULL, stdout=PIPE, stderr=stderr, env=environment, start_new_session=True
            )
        try:
            yield await _ready(process, log)
        finally:
            await _end(process)


async def _ready(process: Process, log: Path) -> str:
    assert process.stdout is not None
    with suppress(TimeoutError):
        async with asyncio.timeout(_START_S):
            async for line in process.stdout:
                if found := re.match(rb"chatd is ready at (\S+)", line):
                    return found[1].decode()
    _show_end(log)
    raise CommandFailed("the server did not become ready; the end of its log stands above")


def _show_end(log: Path) -> None:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    print("\n".join(lines[-_LOG_LINES:]), file=sys.stderr)


async def _end(process: Process) -> None:
    """Asks, then kills; also when this is cancelled in between."""
    if process.returncode is not None:
        return
    try:
        process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
