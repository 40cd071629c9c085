"""The client of the load benchmarks: one streamed chat completion, with the time of everything that came."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any, Literal, TypedDict

import httpx

from chatd.failure import CommandFailed

_LENGTHS = ("ignore_eos", "min_tokens")
_REFUSALS = (400, 422)
_UNREACHED = (httpx.HTTPError, httpx.InvalidURL)
_CONNECT_S = 30.0


class Message(TypedDict):
    role: Literal["system", "user", "assistant"]
    content: str


class RequestFailed(Exception):
    """One request without a whole answer. status: of HTTP, where there is one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(" ".join(message.split())[:300])
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. Seconds, from the moment the request was sent; tokens as the server counts them.

    prompt_tokens, cached_tokens: None where the server does not tell. output_tokens: those of usage, else one for
    each chunk with text. last_token_s: the last chunk with text, or the end that the server tells behind it, when the
    last tokens spell nothing.

        sent ── chunk ─ chunk ─ chunk ── finish_reason ── end of the stream
        |ttft_s|  itl_s   itl_s |              |                 |
        |------------------------ last_token_s |           e2e_s |
    """

    text: str
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    ttft_s: float
    last_token_s: float
    e2e_s: float
    itl_s: tuple[float, ...]

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None for a single one."""
        return (self.last_token_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class ChatClient:
    """A server that speaks the OpenAI protocol. url: without /v1. exact: it takes ignore_eos and min_tokens."""

    http: httpx.AsyncClient
    url: str
    model: str
    exact: bool
    clock: Callable[[], float] = perf_counter

    async def complete(self, messages: Sequence[Message], max_tokens: int) -> Answer:
        """Greedy and streamed; exactly max_tokens where the server lets itself be told. Raises RequestFailed."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.exact:
            body |= dict(zip(_LENGTHS, (True, max_tokens), strict=True))
        stream = _Stream(self.clock)
        try:
            async with self.http.stream("POST", self.url + "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise RequestFailed(_refusal(response, await response.aread()), response.status_code)
                async for line in response.aiter_lines():
                    if stream.take(line):
                        break
        except _UNREACHED as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        return stream.answer()

    async def metrics(self) -> str | None:
        """The server's numbers in Prometheus' format; None where there are none."""
        try:
            response = await self.http.get(self.url + "/metrics")
        except _UNREACHED:
            return None
        return response.text if response.status_code == 200 else None


@asynccontextmanager
async def connect(
    url: str, *, model: str | None = None, api_key: str | None = None, timeout_s: float = 600.0
) -> AsyncIterator[ChatClient]:
    """A client that has had one short answer, and so knows what the server takes. model: by default the first that
    it lists. timeout_s: the longest silence. Raises CommandFailed for a server that does not answer so.

    Proxy variables are not read: a proxy would be measured with the server.
    """
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)
    async with httpx.AsyncClient(timeout=timeout, headers=headers, limits=limits, trust_env=False) as http:
        try:
            client = await _greeted(ChatClient(http, url, model or await _first_model(http, url), exact=True))
        except RequestFailed as error:
            raise CommandFailed(f"{url} gives no answer: {error}") from error
        yield client


async def _greeted(client: ChatClient) -> ChatClient:
    """Warms the server up. One that refuses the parameters for exact lengths is asked without them."""
    hello: list[Message] = [{"role": "user", "content": "Say hello."}]
    try:
        await client.complete(hello, 8)
    except RequestFailed as error:
        if error.status not in _REFUSALS:
            raise
        client = ChatClient(client.http, client.url, client.model, exact=False)
        await client.complete(hello, 8)
    return client


async def _first_model(http: httpx.AsyncClient, url: str) -> str:
    try:
        response = await http.get(url + "/v1/models")
    except _UNREACHED as error:
        raise RequestFailed(f"{type(error).__name__}: {error}") from error
    if response.status_code != 200:
        raise RequestFailed(_refusal(response, response.content), response.status_code)
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise RequestFailed("it lists no models; name one with --model") from error


def _refusal(response: httpx.Response, body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    with suppress(ValueError, LookupError, TypeError):
        text = json.loads(text)["error"]["message"]
    return f"HTTP {response.status_code}: {text}"


@dataclass(slots=True)
class _Stream:
    """Server-sent events of one completion, line by line."""

    clock: Callable[[], float]
    start: float = field(init=False)
    times: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    finished: float | None = None

    def __post_init__(self) -> None:
        self.start = self.clock()

    def take(self, line: str) -> bool:
        """True at the end. Raises RequestFailed for an error that the server tells, and for what is no chunk."""
        now = self.clock() - self.start
        if not line.startswith("data:"):
            return False
        data = line[5:].strip()
        if data == "[DONE]":
            return True
        try:
            self._chunk(json.loads(data), now)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RequestFailed(f"not a chunk of a completion: {data}") from error
        return False

    def _chunk(self, chunk: dict[str, Any], now: float) -> None:
        if "error" in chunk:
            problem = chunk["error"]
            raise RequestFailed(str(problem.get("message", problem) if isinstance(problem, dict) else problem))
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            if text := (choice.get("delta") or {}).get("content"):
                self.times.append(now)
                self.text.append(text)
            if choice.get("finish_reason") is not None:
                self.finished = now

    def answer(self) -> Answer:
        """Raises RequestFailed when the stream broke off, or brought no token."""
        ended = self.clock() - self.start
        if self.finished is None:
            raise RequestFailed("the answer broke off")
        if not self.times and not self.usage.get("completion_tokens"):
            raise RequestFailed("the answer is empty")
        times = self.times or [self.finished]
        details = self.usage.get("prompt_tokens_details") or {}
        return Answer(
            text="".join(self.text),
            prompt_tokens=self.usage.get("prompt_tokens"),
            cached_tokens=details.get("cached_tokens"),
            output_tokens=self.usage.get("completion_tokens") or len(times),
            ttft_s=times[0],
            last_token_s=max(times[-1], self.finished),
            e2e_s=ended,
            itl_s=tuple(later - earlier for earlier, later in pairwise(times)),
        )
