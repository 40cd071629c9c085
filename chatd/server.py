"""uvicorn, told how this server starts, drains and stops."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Generator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from chatd.backend import Backend
from chatd.failure import CommandFailed
from chatd.ws.timing import MAX_FRAME_BYTES

_ABORT_S = 30.0
_STOP_S = 5


class SocketProtocol(WebSocketsSansIOProtocol):
    """Lets a close frame pass a full write buffer, and drops a peer that then still reads nothing."""

    async def send(self, message: Any) -> None:
        if message["type"] == "websocket.close":
            self.writable.set()
            self.loop.call_later(_ABORT_S, self.transport.abort)
        await super().send(message)


class ChatServer(uvicorn.Server):
    """Stops on SIGINT or SIGTERM: drains the backend first; a second signal cuts that short."""

    def __init__(self, app: ASGIApp, backend: Backend) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                ws=SocketProtocol,
                ws_max_size=MAX_FRAME_BYTES,
                ws_per_message_deflate=False,
                ws_ping_interval=20.0,
                ws_ping_timeout=60.0,
                timeout_graceful_shutdown=_STOP_S,
                timeout_keep_alive=30,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
            )
        )
        self._backend = backend
        self._hurry = asyncio.Event()

    def stop(self) -> None:
        """The first call drains, the second stops at once."""
        if self.should_exit:
            self._hurry.set()
            self.force_exit = True
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._backend.drain(self._hurry)
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """A listening address, taken at once so that a used port is known before anything slow. Raises CommandFailed."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        taken = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CommandFailed(f"cannot listen on {host}: {error.strerror}") from error
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
        taken.listen(2048)
    except OSError as error:
        taken.close()
        raise CommandFailed(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return taken


def url_of(taken: socket.socket) -> str:
    """Where a person's browser on this machine finds the server."""
    host, port = taken.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"
