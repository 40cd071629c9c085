"""All socket connections of this process."""

from __future__ import annotations

import asyncio
import secrets

from starlette.websockets import WebSocket

from chatd.ws.connection import CLOSE_RESTART, Connection
from chatd.ws.timing import SocketTiming
from sessions import SessionService, TurnService


class Hub:
    """Serves connections and knows them, so that a shutdown can tell them."""

    def __init__(self, turns: TurnService, sessions: SessionService, timing: SocketTiming) -> None:
        self._turns = turns
        self._sessions = sessions
        self._timing = timing
        self._connections: dict[Connection, None] = {}

    @property
    def connections(self) -> tuple[Connection, ...]:
        """The open ones, the oldest first."""
        return tuple(self._connections)

    async def serve(self, socket: WebSocket) -> None:
        """Returns at the end of the connection."""
        connection = Connection(socket, f"con_{secrets.token_hex(8)}", self._turns, self._sessions, self._timing)
        self._connections[connection] = None
        try:
            await connection.run()
        finally:
            del self._connections[connection]

    def announce_draining(self) -> None:
        for connection in self._connections:
            connection.announce({"type": "server.draining"})

    async def close_all(self) -> None:
        """Closes every connection with 1012, after what is still under way to it."""
        connections = list(self._connections)
        for connection in connections:
            connection.close(CLOSE_RESTART)
        await asyncio.gather(*(connection.ended() for connection in connections))
