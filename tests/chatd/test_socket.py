"""The WebSocket: turns, followers, resuming, cancelling."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.chatd.harness import Server, Socket

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def create(live: Server, socket: Socket, session: str, content: str = "hello", **data: Any) -> dict[str, Any]:
    await socket.send(type="message.create", id="c", session=session, data={"content": content, **data})
    ack = await socket.until("ack", "error", re="c")
    assert ack["type"] == "ack", ack
    return dict(ack["data"])


async def test_hello_comes_first_and_once(live: Server) -> None:
    async with live.raw_socket() as socket:
        assert socket.raw.subprotocol == "chat.v1"
        await socket.send(type="ping", id="early")
        assert (await socket.next())["data"]["code"] == "hello_first"
        await socket.send(type="hello")
        welcome = await socket.next()
        assert welcome["type"] == "welcome"
        assert welcome["data"]["connection_id"].startswith("con_")
        assert (welcome["data"]["heartbeat_ms"], welcome["data"]["limits"]["max_message_bytes"]) == (25000, 1 << 20)
        await socket.send(type="hello", id="again")
        error = await socket.next()
        assert (error["re"], error["data"]["code"]) == ("again", "hello_first")
        await socket.send(type="ping", id="p")
        assert await socket.next() == {"type": "pong", "re": "p"}


async def test_a_turn_reaches_its_sender_and_every_subscriber(live: Server) -> None:
    session = await live.session()
    async with live.subscribed(session) as sender, live.subscribed(session) as other:
        turn = await create(live, sender, session, "hello\nworld", client_msg_id="m")
        gid = turn["generation"]["id"]
        engine = live.engine.latest
        engine.admit()
        engine.say("hé")
        engine.finish()
        for socket in (sender, other):
            done = await socket.until("generation.done", generation=gid)
            assert [frame["seq"] for frame in socket.of(gid)] == [1, 2, 3, 4]
            assert socket.text_of(gid) == "hé"
            kinds = [frame["type"] for frame in socket.frames]
            assert kinds.index("message.created") < kinds.index("generation.started")
            created = next(frame for frame in socket.frames if frame["type"] == "message.created")
            assert (created["session"], created["data"]) == (session, turn)
            progress = next(frame for frame in socket.frames if frame["type"] == "generation.progress")
            assert progress["data"] == {"processed": 30, "total": 30, "cached": 0}
            assert "seq" not in progress
            updated = next(frame for frame in socket.frames if frame["type"] == "session.updated")
            assert updated["data"]["title"] == "hello"
            assert (done["session"], done["data"]["status"], done["data"]["finish_reason"]) == (
                session,
                "complete",
                "stop",
            )
            assert done["data"]["usage"]["completion_tokens"] == 4
        stored = (await live.http.get(f"/api/v1/sessions/{session}/messages")).json()["data"]
        assert stored[1]["content"] == "hé"


async def test_a_sender_that_does_not_subscribe_gets_its_answer(live: Server) -> None:
    session = await live.session()
    async with live.socket() as socket:
        turn = await create(live, socket, session)
        live.engine.latest.admit()
        live.engine.latest.finish()
        await socket.until("generation.done", generation=turn["generation"]["id"])
        assert not [frame for frame in socket.frames if frame["type"] == "message.created"]


async def test_the_same_client_id_twice_is_one_turn(live: Server) -> None:
    session = await live.session()
    async with live.subscribed(session) as socket:
        first = await create(live, socket, session, client_msg_id="m")
        second = await create(live, socket, session, client_msg_id="m")
        assert first["generation"]["id"] == second["generation"]["id"]
        live.engine.latest.admit()
        live.engine.latest.say("x")
        live.engine.latest.finish()
        await socket.until("generation.done")
        assert [frame["seq"] for frame in socket.of(first["generation"]["id"])] == [1, 2, 3]


async def test_subscribing_to_a_running_turn_gives_a_snapshot_and_the_rest(live: Server) -> None:
    session = await live.session()
    turn = await live.start(session)
    gid = turn["generation"]["id"]
    engine = live.engine.latest
    engine.admit()
    engine.say("one ")
    async with live.subscribed(session) as socket:
        snapshot = await socket.until("snapshot")
        engine.say("two")
        engine.finish()
        await socket.until("generation.done")
        assert snapshot["data"]["message"]["id"] == turn["reply"]["id"]
        assert snapshot["data"]["message"]["status"] == "streaming"
        assert socket.text_of(gid) == "one two"


async def test_subscribing_twice_repeats_the_snapshot_and_nothing_else(live: Server) -> None:
    session = await live.session()
    gid = (await live.start(session))["generation"]["id"]
    engine = live.engine.latest
    engine.admit()
    async with live.subscribed(session) as socket:
        await socket.until("snapshot")
        await socket.send(type="subscribe", id="again", session=session)
        await socket.until("snapshot")
        engine.say("abc")
        engine.finish()
        await socket.until("generation.done")
        assert socket.text_of(gid) == "abc"
        await socket.send(type="ping")
        await socket.until("pong")
        assert [frame["type"] for frame in socket.frames].count("generation.done") == 1


@pytest.mark.parametrize("last_seq", [0, 1, 2, 3, 4])
async def test_resuming_leaves_no_gap_and_no_double(live: Server, last_seq: int) -> None:
    session = await live.session()
    gid = (await live.start(session))["generation"]["id"]
    engine = live.engine.latest
    engine.admit()
    engine.say("abc")
    async with live.subscribed(session) as socket:
        await socket.until("snapshot", seq=4)
    async with live.socket(resume=[{"generation": gid, "last_seq": last_seq}]) as socket:
        engine.say("de")
        engine.finish()
        await socket.until("generation.done")
        assert [frame["seq"] for frame in socket.of(gid)] == list(range(last_seq + 1, 8))
        assert len(live.engine.all) == live.engine.all.index(engine) + 1


async def test_resuming_after_the_end_gives_the_end_again(live: Server) -> None:
    session = await live.session()
    gid = (await live.start(session))["generation"]["id"]
    live.engine.latest.admit()
    live.engine.latest.finish()
    async with live.socket(resume=[{"generation": gid, "last_seq": 1}]) as socket:
        assert (await socket.until("generation.done"))["seq"] == 2


async def test_resuming_ahead_of_the_log_gives_the_stored_message(live: Server) -> None:
    session = await live.session()
    gid = (await live.start(session))["generation"]["id"]
    live.engine.latest.admit()
    async with live.raw_socket() as socket:
        await socket.send(type="hello", data={"resume": [{"generation": gid, "last_seq": 1000}]})
        await socket.until("resume.reset", generation=gid)
    ahead = await live.http.get(f"/api/v1/generations/{gid}/events?after=1000")
    assert (ahead.status_code, ahead.json()["code"]) == (410, "log_gone")
    live.engine.latest.finish()


async def test_resuming_what_is_gone_gives_the_stored_message(live: Server) -> None:
    session = await live.session()
    turn = await live.start(session)
    gid = turn["generation"]["id"]
    live.engine.latest.admit()
    live.engine.latest.say("kept")
    live.engine.latest.finish()
    async with live.socket(resume=[{"generation": gid, "last_seq": 0}]) as socket:
        await socket.until("generation.done")
    await live.backend.turns.broker.drop(gid)
    points = [{"generation": gid, "last_seq": 1}, {"generation": "gen_unknown", "last_seq": 1}]
    async with live.raw_socket() as socket:
        await socket.send(type="hello", data={"resume": points})
        kept = await socket.until("resume.reset", generation=gid)
        assert (kept["data"]["message"]["id"], kept["data"]["message"]["content"]) == (turn["reply"]["id"], "kept")
        if not any(frame.get("generation") == "gen_unknown" for frame in socket.frames):
            await socket.until("resume.reset", generation="gen_unknown")
        unknown = next(frame for frame in socket.frames if frame.get("generation") == "gen_unknown")
        assert unknown["data"] == {"message": None}
    gone = await live.http.get(f"/api/v1/generations/{gid}/events")
    assert (gone.status_code, gone.json()["code"]) == (410, "log_gone")


async def test_cancelling(live: Server) -> None:
    session = await live.session()
    async with live.subscribed(session) as socket:
        gid = (await create(live, socket, session))["generation"]["id"]
        live.engine.latest.admit()
        live.engine.latest.say("half")
        await socket.until("generation.delta")
        await socket.send(type="generation.cancel", id="x", generation=gid)
        frames = [await socket.until("ack", "generation.done"), await socket.until("ack", "generation.done")]
        by_type = {frame["type"]: frame for frame in frames}
        assert by_type["generation.done"]["data"]["status"] == "cancelled"
        assert by_type["ack"]["data"]["generation"]["status"] == "cancelled"
        await socket.send(type="generation.cancel", id="y", generation=gid)
        assert (await socket.until("ack", re="y"))["data"]["generation"]["status"] == "cancelled"


async def test_a_failed_generation(live: Server) -> None:
    session = await live.session()
    async with live.subscribed(session) as socket:
        turn = await create(live, socket, session)
        live.engine.latest.fail("boom", "it broke")
        failed = await socket.until("generation.failed")
        assert failed["data"] == {"message_id": turn["reply"]["id"], "code": "boom", "message": "it broke"}


async def test_a_dropped_connection_does_not_stop_the_turn(live: Server) -> None:
    session = await live.session()
    async with live.subscribed(session) as socket:
        gid = (await create(live, socket, session))["generation"]["id"]
        engine = live.engine.latest
        engine.admit()
        await socket.until("generation.started")
        socket.raw.transport.abort()
    engine.say("on and on")
    engine.finish()
    async with live.socket(resume=[{"generation": gid, "last_seq": 1}]) as socket:
        await socket.until("generation.done")
    assert gid not in live.engine.aborted


async def test_unsubscribing_ends_everything_of_the_session(live: Server) -> None:
    session = await live.session()
    async with live.subscribed(session) as socket:
        gid = (await create(live, socket, session))["generation"]["id"]
        live.engine.latest.admit()
        await socket.until("generation.started")
        await socket.send(type="unsubscribe", id="u", session=session)
        await socket.until("ack", re="u")
        seen = len(socket.frames)
        live.engine.latest.say("unheard")
        live.engine.latest.finish()
        async with live.socket(resume=[{"generation": gid, "last_seq": 0}]) as other:
            await other.until("generation.done")
        await socket.send(type="ping")
        await socket.until("pong")
        assert [frame["type"] for frame in socket.frames[seen:]] == ["pong"]


async def test_subscribers_hear_of_deletion_and_of_trimming(live: Server) -> None:
    session = await live.session()
    for number in range(3):
        turn = await live.start(session, f"{number}" * 900)
        live.engine.latest.admit()
        live.engine.latest.finish()
        async with live.socket(resume=[{"generation": turn["generation"]["id"], "last_seq": 0}]) as other:
            await other.until("generation.done")
    async with live.subscribed(session) as socket:
        gid = (await create(live, socket, session, "4" * 900))["generation"]["id"]
        trimmed = next(
            (frame for frame in socket.frames if frame["type"] == "context.trimmed"), None
        ) or await socket.until("context.trimmed")
        assert (trimmed["session"], trimmed["generation"]) == (session, gid)
        assert trimmed["data"]["dropped_messages"] > 0
        await live.http.delete(f"/api/v1/sessions/{session}")
        assert await socket.until("session.deleted") == {"type": "session.deleted", "session": session}


BAD_FRAMES: list[tuple[Any, str]] = [
    ({"type": "nothing"}, "invalid_input"),
    ({"type": 5}, "invalid_input"),
    ({}, "invalid_input"),
    ([], "invalid_input"),
    ("text", "invalid_input"),
    (None, "invalid_input"),
    ({"type": "ping", "SECRET!": 1}, "invalid_input"),
    ({"type": "ping", "id": 7}, "invalid_input"),
    ({"type": "SECRET" * 9000}, "invalid_input"),
    ({"type": "subscribe"}, "invalid_input"),
    ({"type": "subscribe", "session": 5}, "invalid_input"),
    ({"type": "subscribe", "session": "ses_SECRET"}, "not_found"),
    ({"type": "subscribe", "session": "ses_\0"}, "invalid_input"),
    ({"type": "generation.cancel", "generation": "gen_SECRET"}, "not_found"),
    ({"type": "message.create", "session": "ses_SECRET", "data": {"content": "x"}}, "not_found"),
    ({"type": "message.create", "session": "SES", "data": {"content": ""}}, "invalid_input"),
    ({"type": "message.create", "session": "SES", "data": {"content": "a\0"}}, "invalid_input"),
    ({"type": "message.create", "session": "SES", "data": {"content": "a\ud800"}}, "invalid_input"),
    ({"type": "message.create", "session": "SES", "data": {"content": "x", "params": {"seed": "1"}}}, "invalid_input"),
    ({"type": "message.create", "session": "SES", "data": {"content": "x", "parent_id": "msg_0"}}, "invalid_input"),
    ({"type": "message.create", "session": "SES", "data": {"content": "x" * 6000}}, "context_length_exceeded"),
    ({"type": "message.create", "session": "SES"}, "invalid_input"),
]


@pytest.mark.parametrize(("frame", "code"), BAD_FRAMES, ids=[str(number) for number in range(len(BAD_FRAMES))])
async def test_bad_frames_are_answered_and_the_socket_stays(live: Server, frame: Any, code: str) -> None:
    session = await live.session()
    named = isinstance(frame, dict) and "id" not in frame
    if isinstance(frame, dict):
        frame = {**frame, **({"id": "bad"} if named else {})}
        frame = {**frame, **({"session": session} if frame.get("session") == "SES" else {})}
    async with live.socket() as socket:
        await socket.raw.send(json.dumps(frame))
        error = await socket.next()
        assert (error["type"], error["data"]["code"]) == ("error", code)
        assert error.get("re") == ("bad" if named else None)
        assert "SECRET" not in str(error["data"])
        await socket.send(type="ping")
        assert (await socket.next())["type"] == "pong"
