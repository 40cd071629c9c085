"""Server-sent events: one write for each chunk, comments while nothing comes, and an eye on the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

KEEPALIVE_S = 15.0
_COMMENT = b": keep-alive\n\n"


class EventStream(Response):
    """Streams `chunks`, whole events in UTF-8.

    on_disconnect: called when the client goes away, and has to make `chunks` end soon; without it they are dropped.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        *,
        on_disconnect: Callable[[], None] | None = None,
        keepalive_s: float = KEEPALIVE_S,
        background: BackgroundTask | None = None,
    ) -> None:
        self.status_code = 200
        self.background = background
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._on_disconnect = on_disconnect
        self._keepalive_s = keepalive_s
        self._quiet = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        writing = asyncio.create_task(self._write(send))
        watching = asyncio.create_task(self._watch(receive, send))
        try:
            await asyncio.wait((writing, watching), return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                if self._on_disconnect is None:
                    writing.cancel()
                else:
                    self._on_disconnect()
            await asyncio.gather(writing, return_exceptions=True)
        finally:
            watching.cancel()
            writing.cancel()
            await asyncio.gather(writing, watching, return_exceptions=True)
        if not writing.cancelled():
            writing.result()

    async def _write(self, send: Send) -> None:
        async for chunk in self._chunks:
            self._quiet = False
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Ends when the client has gone."""
        while True:
            try:
                async with asyncio.timeout(self._keepalive_s):
                    message = await receive()
            except TimeoutError:
                if self._quiet:
                    await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
                self._quiet = True
            else:
                if message["type"] == "http.disconnect":
                    return
