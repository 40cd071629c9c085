"""The terminal client against a server, with what it writes and what it does on Ctrl-C."""

from __future__ import annotations

import asyncio
import io
import signal
from pathlib import Path
from typing import Any

import pytest

from chatd.terminal.client import ChatClient, ConnectionLost, Refused
from chatd.terminal.interrupts import Interrupts
from chatd.terminal.prompt import read_lines
from chatd.terminal.stats import stats_line
from tests.chatd.harness import Engines, serving


class Pressed(Interrupts):
    """Interrupts that a test presses."""

    def press(self) -> None:
        self._interrupted(signal.SIGINT, None)


def usage(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@pytest.mark.parametrize(
    ("tokens", "timings", "line"),
    [
        ((1204, 1152, 89), (43.2, 1000.0), "prompt 1,204 (cached 1,152) · TTFT 43 ms · 88 tok/s"),
        ((5, 0, 1), (1234.0, 0.0), "prompt 5 (cached 0) · TTFT 1,234 ms"),
        ((5, 0, 0), (None, 0.0), "prompt 5 (cached 0)"),
        (None, None, ""),
    ],
)
def test_the_line_below_an_answer(tokens: Any, timings: Any, line: str) -> None:
    measured = None if timings is None else {"ttft_ms": timings[0], "decode_ms": timings[1]}
    assert stats_line(None if tokens is None else usage(*tokens), measured) == line


async def test_lines_are_asked_and_answered(tmp_path: Path) -> None:
    async with serving(tmp_path, Engines(reply=lambda request: "hé")) as server:

        def talk() -> tuple[str, str]:
            out = io.StringIO()
            with ChatClient.connect(server.url, None) as client:
                client.ask("hello", Interrupts(), out)
            with ChatClient.connect(server.url + "/", client.session_id) as again:
                again.ask("again", Interrupts(), out)
            return client.session_id, out.getvalue()

        session, text = await asyncio.to_thread(talk)
        messages = (await server.http.get(f"/api/v1/sessions/{session}/messages")).json()["data"]
    numbers = "prompt {} (cached {}) · TTFT 4 ms · 1,000 tok/s\n"
    assert text == "hé\n" + numbers.format(24, 0) + "hé\n" + numbers.format(53, 16)
    assert [message["content"] for message in messages] == ["hello", "hé", "again", "hé"]


async def test_the_first_interrupt_cancels_and_the_second_leaves(tmp_path: Path) -> None:
    out, keys = io.StringIO(), Pressed()
    async with serving(tmp_path) as server:

        def talk() -> None:
            with ChatClient.connect(server.url, None) as client:
                client.ask("hello", keys, out)
                assert (keys.cancelling, keys.leaving) == (True, False)
                client.ask("more", keys, out)

        talking = asyncio.create_task(asyncio.to_thread(talk))
        engine = await server.engine.next_request(1)
        engine.admit()
        engine.say("half")
        keys.press()
        await server.engine.next_request(2)
        assert out.getvalue().startswith("half\nprompt 24 (cached 0)")
        assert out.getvalue().endswith("· cancelled\n")
        keys.press()
        keys.press()
        await talking
        assert keys.leaving
    with pytest.raises(KeyboardInterrupt):
        keys.press()


async def test_what_goes_wrong(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:

        def talk() -> None:
            with pytest.raises(Refused, match="no such session"), ChatClient.connect(server.url, "ses_0"):
                pass
            with ChatClient.connect(server.url, None) as client:
                with pytest.raises(Refused, match="do not fit"):
                    client.ask("x" * 5000, Interrupts(), io.StringIO())
                with pytest.raises(Refused, match="it broke"):
                    client.ask("hello", Interrupts(), io.StringIO())
                out = io.StringIO()
                client.ask("hello", Interrupts(), out)
                assert out.getvalue().endswith("· interrupted\n")
                with pytest.raises(ConnectionLost):
                    client.ask("hello", Interrupts(), out)

        talking = asyncio.create_task(asyncio.to_thread(talk))
        (await server.engine.next_request(1)).fail("boom", "it broke")
        await server.engine.next_request(2)
        await server.backend.drain()
        await talking


def test_piped_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\n  two \nthree"))
    assert list(read_lines(Interrupts())) == ["one", "two", "three"]
