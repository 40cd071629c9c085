"""A tiny server that speaks the OpenAI protocol: it checks every field and counts words as tokens."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

ALWAYS = {"model", "messages", "max_tokens", "temperature", "stream", "stream_options"}
EXACT = {"ignore_eos", "min_tokens"}


@dataclass
class FakeServer:
    """A prompt has two tokens for each message, one for the answer's header, and one for each word (two for a word in
    `split`). Of it, what began an earlier prompt and its answer is cached.

    model: what clients must ask for. listed: what they are told. key: what they must send. exact False: ignore_eos and
    min_tokens are refused, system False: system messages are. usage False: no usage is told. lengths: what becomes of
    max_tokens. refuse: a status in place of an answer, for the n-th request (from 0 on). hold: whether the n-th answer
    never goes on. metrics: its text after so many answers.
    """

    model: str = "fake"
    listed: str = "fake"
    key: str | None = None
    exact: bool = True
    system: bool = True
    usage: bool = True
    split: frozenset[str] = frozenset()
    lengths: Callable[[int], int] = lambda wanted: wanted
    refuse: Callable[[int], int | None] = lambda number: None
    on_request: Callable[[int], None] = lambda number: None
    hold: Callable[[int], bool] = lambda number: False
    metrics: Callable[[int], str | None] = lambda answered: None
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    answered: int = 0
    _seen: list[list[str]] = field(default_factory=list)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/metrics", self._metrics),
            ]
        )

    def tokens(self, messages: list[dict[str, str]]) -> list[str]:
        tokens = []
        for message in messages:
            words = [[word, "+"] if word in self.split else [word] for word in message["content"].split()]
            tokens += [message["role"], *(token for word in words for token in word), "end"]
        return [*tokens, "assistant"]

    def prompts(self) -> list[int]:
        """Tokens of every prompt so far."""
        return [len(self.tokens(body["messages"])) for body in self.bodies]

    def _check(self, request: Request, body: dict[str, Any]) -> None:
        expected = ALWAYS | (EXACT if self.exact else set())
        wanted = body.get("max_tokens")
        fixed = {"model": self.model, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        if self.exact:
            fixed |= {"ignore_eos": True, "min_tokens": wanted}
        if set(body) != expected or {name: body[name] for name in fixed} != fixed:
            self.problems.append(f"body: {body}")
        if not isinstance(wanted, int) or wanted < 1:
            self.problems.append(f"max_tokens: {wanted}")
        if any(set(message) != {"role", "content"} or not message["content"] for message in body["messages"]):
            self.problems.append(f"messages: {body['messages']}")
        bearer = None if self.key is None else f"Bearer {self.key}"
        if request.headers.get("authorization") != bearer:
            self.problems.append("authorization")

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.listed, "object": "model"}]})

    async def _metrics(self, request: Request) -> Response:
        text = self.metrics(self.answered)
        return Response("", 404) if text is None else Response(text)

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        if not self.exact and EXACT & set(body):
            return _error(400, "unknown parameter: ignore_eos")
        if not self.system and body["messages"][0]["role"] == "system":
            return _error(400, "system role not supported")
        number = len(self.bodies)
        self.bodies.append(body)
        self._check(request, body)
        self.on_request(number)
        if (status := self.refuse(number)) is not None:
            return _error(status, f"refused with {status}")
        return StreamingResponse(self._stream(body, self.hold(number)), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any], hold: bool) -> AsyncIterator[str]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            prompt, length = self.tokens(body["messages"]), self.lengths(body["max_tokens"])
            cached = max((_common(prompt, seen) for seen in self._seen), default=0)
            words = [f"a{number}" for number in range(length)]
            self._seen.append([*prompt, *words])
            yield _chunk({"role": "assistant", "content": ""})
            if hold:
                await asyncio.Event().wait()
            for word in words:
                await asyncio.sleep(0)
                yield _chunk({"content": word + " "})
            yield _chunk({}, "length")
            if self.usage:
                usage = {
                    "prompt_tokens": len(prompt),
                    "completion_tokens": length,
                    "prompt_tokens_details": {"cached_tokens": cached},
                }
                yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
            self.answered += 1
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1


@contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    """Runs it in a thread; at the end every request must have been as it should be."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)
    server.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    config = uvicorn.Config(server.app(), lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        running.should_exit = True
        thread.join(10)
        listening.close()
    assert not server.problems


def _common(first: list[str], second: list[str]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _chunk(delta: dict[str, str], reason: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice], 'usage': None})}\n\n"


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status)
