"""What a connection may not do, and what it is spared."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from chatd.ws.rate import TokenBucket
from chatd.ws.timing import SocketTiming
from tests.chatd.harness import WITHIN_S, Server, serving, sse


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{", 4400),
        ("", 4400),
        ("[" * 100_000, 4400),
        (b"{}", 4400),
        ('{"type":"ping","id":"' + "x" * (1 << 20) + '"}', 1009),
    ],
    ids=["broken", "empty", "deep", "binary", "oversize"],
)
async def test_what_ends_a_connection(tmp_path: Path, message: Any, code: int) -> None:
    async with serving(tmp_path) as server:
        async with server.socket() as socket:
            await socket.raw.send(message)
            assert await socket.closed() == code
        async with server.socket():
            pass


async def test_something_is_sent_at_every_heartbeat(tmp_path: Path) -> None:
    async with serving(tmp_path, timing=SocketTiming(heartbeat_s=0.1)) as server, server.raw_socket() as socket:
        assert await socket.next() == {"type": "pong"}
        assert await socket.next() == {"type": "pong"}


async def test_a_client_that_sends_too_much_is_told(tmp_path: Path) -> None:
    async with serving(tmp_path, timing=SocketTiming(frames_per_s=0, burst=3)) as server, server.socket() as socket:
        for _ in range(3):
            await socket.send(type="ping", id="p")
        replies = [await socket.next() for _ in range(3)]
        assert [reply["type"] for reply in replies] == ["pong", "pong", "error"]
        assert replies[2]["re"] == "p"
        assert replies[2]["data"] == {"code": "rate_limited", "message": "too many frames", "retryable": True}


def test_a_bucket_fills_up_again() -> None:
    now = 0.0
    bucket = TokenBucket(2.0, 3, lambda: now)
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]
    now = 0.5
    assert [bucket.take() for _ in range(2)] == [True, False]
    now = 100.0
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]


PIECE = "x" * 2000
"""Some hundreds of these fill every buffer between the server and a client that does not read."""


async def fill(server: Server, session: str, pieces: int) -> str:
    """A turn that has sent more than a connection holds; the log is complete up to seq pieces + 1."""
    gid = str((await server.start(session))["generation"]["id"])
    engine = server.engine.latest
    engine.admit()
    async with server.http.stream("GET", f"/api/v1/generations/{gid}/events") as response:
        events = sse(response)
        for _ in range(pieces):
            engine.say_piece(PIECE)
            while int((await anext(events))["id"]) < len(engine.output) + 1:
                pass
    return gid


@pytest.mark.parametrize(("snapshot_above", "expected"), [(10_000, False), (100, True)], ids=["merged", "snapshot"])
async def test_a_slow_reader_gets_merged_deltas_or_a_snapshot(
    tmp_path: Path, snapshot_above: int, expected: bool
) -> None:
    timing = SocketTiming(outbox_frames=4, snapshot_above=snapshot_above)
    async with serving(tmp_path, timing=timing) as server:
        session = await server.session()
        async with server.subscribed(session, small=True) as slow:
            gid = await fill(server, session, 500)
            server.engine.latest.finish()
            await slow.until("generation.done")
            assert slow.text_of(gid) == PIECE * 500
            kinds = [frame["type"] for frame in slow.of(gid)]
            assert ("snapshot" in kinds) is expected
            assert len(kinds) < 500
            assert (kinds[0], kinds.count("generation.done")) == ("generation.started", 1)


async def test_a_reader_that_stalls_is_closed(tmp_path: Path) -> None:
    """Once there is something to send that it has no room for: what is behind may have become one frame, which has."""
    async with serving(tmp_path, timing=SocketTiming(outbox_frames=4, stall_s=0.5)) as server:
        session = await server.session()
        async with server.subscribed(session, small=True) as stalled, server.subscribed(session) as quick:
            reading = asyncio.create_task(quick.until("generation.done"))
            gid, pieces = await fill(server, session, 500), 500
            ended = asyncio.create_task(server.backend.hub.connections[0].ended())
            async with asyncio.timeout(WITHIN_S):
                while not (await asyncio.wait([ended], timeout=0.1))[0]:
                    server.engine.latest.say_piece(PIECE)
                    pieces += 1
            assert await stalled.closed() == 4408
            server.engine.latest.finish()
            await reading
            assert quick.text_of(gid) == PIECE * pieces


async def test_frames_of_different_kinds_keep_their_order(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, server.socket() as socket:
        await socket.raw.send(json.dumps({"type": "ping", "id": "1"}))
        await socket.raw.send(json.dumps({"type": "subscribe", "id": "2", "session": "ses_0"}))
        await socket.raw.send(json.dumps({"type": "ping", "id": "3"}))
        assert [(await socket.next())["re"] for _ in range(3)] == ["1", "2", "3"]
