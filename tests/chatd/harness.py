"""A real server on a loopback port, around an engine that the test drives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from chatd.app import create_app
from chatd.backend import Backend, open_backend
from chatd.server import ChatServer, bind, url_of
from chatd.settings import Settings
from chatd.static import DIST
from chatd.ws.timing import SocketTiming
from engine.api import Delta, Engine, Event, GenerateRequest
from tests.sessions.letters_codec import LettersCodec, token
from tests.sessions.scripted_engine import Live, ScriptedEngine

JSON = {"content-type": "application/json"}
SMALL_BUFFER = 8192
WITHIN_S = 5.0
"""How long anything may take before a test gives up; nothing waits this long when it works."""


class RememberingCodec(LettersCodec):
    """Notes what it is told to remember, and in which namespace prompts look."""

    def __init__(self) -> None:
        super().__init__()
        self.remembered: list[tuple[str, list[int], list[int], str]] = []
        self.namespaces: list[str | None] = []

    def prompt(self, messages: Any, *, namespace: str | None = None, **options: Any) -> Any:
        self.namespaces.append(namespace)
        options.setdefault("now", datetime(2026, 1, 1, tzinfo=UTC))
        return super().prompt(messages, **options)

    def remember(self, namespace: str, prompt_tokens: Any, ids: Any, text: str) -> None:
        self.remembered.append((namespace, list(prompt_tokens), list(ids), text))


class Talk(Live):
    def say_piece(self, text: str) -> None:
        """One delta with as much text as is wanted."""
        self.output.append(token(0))
        self._put(Delta(self.request.id, (token(0),), text))


class Engines(ScriptedEngine):
    """A scripted engine that also takes requests without a session, and tells when they come."""

    def __init__(self, **options: Any) -> None:
        self.memory = RememberingCodec()
        super().__init__(codec=self.memory, **options)
        self.arrived = asyncio.Condition()

    def submit(self, request: GenerateRequest) -> AsyncIterator[Event]:
        assert request.id not in self.live
        self.check(len(request.tokens), request.params)
        live = self.live[request.id] = Talk(self, request)
        self.all.append(live)
        if self.reply is not None:
            live.admit()
            live.say(self.reply(request))
            live.finish()
        asyncio.get_running_loop().create_task(self._tell())
        return live.events()

    async def _tell(self) -> None:
        async with self.arrived:
            self.arrived.notify_all()

    @property
    def latest(self) -> Talk:
        found = super().latest
        assert isinstance(found, Talk)
        return found

    async def next_request(self, number: int) -> Live:
        """The request of this number, from 1, once it has arrived."""
        async with asyncio.timeout(WITHIN_S), self.arrived:
            await self.arrived.wait_for(lambda: len(self.all) >= number)
        return self.all[number - 1]


class Socket:
    """A client of the WebSocket that remembers all frames."""

    def __init__(self, raw: ClientConnection) -> None:
        self.raw = raw
        self.frames: list[dict[str, Any]] = []

    async def send(self, **frame: Any) -> None:
        await self.raw.send(json.dumps(frame))

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(WITHIN_S):
            self.frames.append(json.loads(await self.raw.recv()))
        return self.frames[-1]

    async def until(self, *types: str, **fields: Any) -> dict[str, Any]:
        """The next frame of one of these types with these fields; earlier ones are only remembered."""
        while True:
            frame = await self.next()
            if frame["type"] in types and all(frame.get(name) == value for name, value in fields.items()):
                return frame

    async def closed(self) -> int | None:
        """Reads to the end; gives the close code."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.next()
        return self.raw.close_code

    def of(self, generation: str) -> list[dict[str, Any]]:
        return [frame for frame in self.frames if frame.get("generation") == generation and "seq" in frame]

    def text_of(self, generation: str) -> str:
        """The answer as a client has it, from snapshots and deltas; fails on a gap or a repeat."""
        text, last = "", 0
        for frame in self.of(generation):
            if frame["type"] == "snapshot":
                text, last = frame["data"]["message"]["content"], frame["seq"]
                continue
            assert frame.get("seq_from", frame["seq"]) == last + 1, frame
            last = frame["seq"]
            if frame["type"] == "generation.delta":
                assert frame["data"]["offset"] == len(text)
                text += frame["data"]["text"]
        return text


@dataclass
class Server:
    """url, an HTTP client, and what the test drives behind them."""

    url: str
    http: httpx.AsyncClient
    engine: Engines
    backend: Backend
    uvicorn: ChatServer

    async def session(self, **body: Any) -> str:
        response = await self.http.post("/api/v1/sessions", json=body)
        assert response.status_code == 201, response.text
        return str(response.json()["id"])

    async def start(self, session: str, content: str = "hello", **body: Any) -> dict[str, Any]:
        response = await self.http.post(f"/api/v1/sessions/{session}/messages", json={"content": content, **body})
        assert response.status_code == 202, response.text
        turn: dict[str, Any] = response.json()
        return turn

    @asynccontextmanager
    async def raw_socket(self, *, small: bool = False, **options: Any) -> AsyncIterator[Socket]:
        """small: with little room for what is sent and not yet read."""
        if small:
            host, port = self.url.removeprefix("http://").split(":")
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
            connection.connect((host, int(port)))
            options = {"sock": connection, "max_queue": 1, **options}
        url = self.url.replace("http", "ws", 1) + "/api/v1/ws"
        options = {"subprotocols": ["chat.v1"], "compression": None, "proxy": None, "max_size": None, **options}
        async with connect(url, **options) as raw:
            yield Socket(raw)

    @asynccontextmanager
    async def socket(self, resume: list[dict[str, Any]] | None = None, **options: Any) -> AsyncIterator[Socket]:
        """Greeted."""
        async with self.raw_socket(**options) as socket:
            await socket.send(type="hello", resume=resume or [])
            await socket.until("welcome")
            yield socket

    @asynccontextmanager
    async def subscribed(self, session: str, **options: Any) -> AsyncIterator[Socket]:
        async with self.socket(**options) as socket:
            await socket.send(type="subscribe", id="s", session=session)
            await socket.until("ack", re="s")
            yield socket


@asynccontextmanager
async def serving(
    folder: Path,
    engine: Engines | None = None,
    *,
    loader: Callable[[], Engine] | None = None,
    timing: SocketTiming | None = None,
    pages: Path = DIST,
    **settings: Any,
) -> AsyncIterator[Server]:
    engine = engine or Engines()
    chosen = Settings(**{"data_dir": folder / "data", "shutdown_grace_s": 0, **settings})
    with bind("127.0.0.1", 0) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
        async with open_backend(chosen, loader or (lambda: engine), timing=timing) as backend:
            server = ChatServer(create_app(backend, pages), backend)
            running = asyncio.create_task(server.serve(sockets=[listening]))
            if loader is None:
                await backend.loading
            url = url_of(listening)
            try:
                async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=WITHIN_S) as http:
                    yield Server(url, http, engine, backend, server)
            finally:
                server.should_exit = True
                await running


async def sse(response: httpx.Response) -> AsyncIterator[dict[str, str]]:
    """Server-sent events as dicts of their fields."""
    event: dict[str, str] = {}
    async for line in response.aiter_lines():
        if not line and event:
            yield event
            event = {}
        elif line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            event[name] = value
