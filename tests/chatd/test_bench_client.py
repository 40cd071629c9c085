"""The client of the load benchmarks: what is measured of a stream, and what counts as a failure."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from chatd.bench.client import ChatClient, RequestFailed

Event = tuple[float, Any]


def delta(text: str | None = None, reason: str | None = None) -> dict[str, Any]:
    content = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": content, "finish_reason": reason}]}


def usage(prompt: int, cached: int | None, completion: int) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **details}}


class Script(httpx.AsyncByteStream):
    """Bytes that come at known seconds of a clock."""

    def __init__(self, events: list[Event]) -> None:
        self.events, self.now = events, 0.0

    def clock(self) -> float:
        return self.now

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for now, event in self.events:
            self.now = now
            text = event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"
            yield text.encode()


async def play(events: list[Event], status: int = 200) -> Any:
    script = Script(events)
    transport = httpx.MockTransport(lambda request: httpx.Response(status, stream=script))
    async with httpx.AsyncClient(transport=transport) as http:
        client = ChatClient(http, "http://fake", "m", exact=True, clock=script.clock)
        return await client.complete([{"role": "user", "content": "hello"}], 3)


START: list[Event] = [(1, delta(""))]
END: list[Event] = [(7, "data: [DONE]\n\n")]
TEXT: list[Event] = [(2, delta("a")), (3, delta("b")), (5, delta("c"))]


@pytest.mark.parametrize(
    ("events", "tokens", "ttft", "tpot", "itl"),
    [
        ([*START, *TEXT, (5, delta(reason="length")), (6, usage(9, 4, 3)), *END], (9, 4, 3), 2, 1.5, (1, 2)),
        ([*START, *TEXT, (5, delta(reason="length")), (6, usage(9, None, 3)), *END], (9, None, 3), 2, 1.5, (1, 2)),
        # Chunks stand for tokens where there is no usage.
        ([*TEXT, (5, delta(reason="stop")), *END], (None, None, 3), 2, 1.5, (1, 2)),
        # Five tokens, of which the last two spell nothing: the end counts.
        ([*TEXT, (6, delta(reason="length")), (6, usage(9, 0, 5)), *END], (9, 0, 5), 2, 1.0, (1, 2)),
        # The last text comes together with the end, and the usage with both.
        ([*TEXT[:2], (4, {**usage(9, 0, 3), **delta("c", "length")}), *END], (9, 0, 3), 2, 1.0, (1, 1)),
        ([(2, delta("a")), (2, delta(reason="length")), (2, usage(9, 0, 1)), *END], (9, 0, 1), 2, None, ()),
        # A token that is half a character.
        ([(2, delta("")), (3, delta(reason="length")), (3, usage(9, 0, 1)), *END], (9, 0, 1), 3, None, ()),
        ([(0, ": a comment\n\n"), *TEXT, (5, delta(reason="stop")), *END], (None, None, 3), 2, 1.5, (1, 2)),
    ],
)
async def test_what_is_measured(events: list[Event], tokens: Any, ttft: Any, tpot: Any, itl: Any) -> None:
    answer = await play(events)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == tokens
    assert (answer.ttft_s, answer.tpot_s, answer.itl_s, answer.e2e_s) == (ttft, tpot, itl, 7)


@pytest.mark.parametrize(
    ("events", "status", "message"),
    [
        ([(1, '{"error": {"message": "too\\nbusy"}}')], 503, "HTTP 503: too busy"),
        ([(1, "<html>gateway</html>")], 502, "HTTP 502: <html>gateway</html>"),
        ([(1, "[1]")], 500, "HTTP 500: [1]"),
        ([*TEXT, (5, {"error": {"message": "out of pages"}})], 200, "out of pages"),
        ([*TEXT, (5, {"error": "plain"})], 200, "plain"),
        (TEXT, 200, "the answer broke off"),
        ([*TEXT, *END], 200, "the answer broke off"),
        ([(1, delta("")), (2, delta(reason="stop")), (3, usage(9, 0, 0)), *END], 200, "the answer is empty"),
        ([(1, "data: {broken\n\n")], 200, "not a chunk of a completion: {broken"),
        ([(1, "data: 5\n\n")], 200, "not a chunk of a completion: 5"),
        ([], 200, "the answer broke off"),
    ],
)
async def test_what_is_no_answer(events: list[Event], status: int, message: str) -> None:
    with pytest.raises(RequestFailed) as raised:
        await play(events, status)
    assert str(raised.value) == message
    assert raised.value.status == (None if status == 200 else status)
