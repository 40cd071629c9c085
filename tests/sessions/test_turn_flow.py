"""Turns from start to end, over SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.api import SamplingParams, Usage
from engine.errors import EngineStopped, QueueFull, RequestTooLong
from sessions import (
    ContextOverflow,
    IdempotencyConflict,
    InvalidInput,
    NotFound,
    SessionBusy,
    SessionsError,
    StorageBusy,
    message_json,
)
from tests.sessions.letters_codec import LettersCodec
from tests.sessions.rig import OWNER, Rig
from tests.sessions.scripted_engine import ScriptedEngine

OpenRig = Callable[..., Awaitable[Rig]]


async def test_a_turn_leaves_a_log_and_the_same_in_the_database(rig: Rig) -> None:
    session = await rig.session()
    turn = await rig.ask(session, "hello", "hé")
    log = await rig.log(turn)
    assert [(event.seq_from, event.seq, event.type) for event in log] == [
        (1, 1, "generation.started"),
        (2, 2, "generation.delta"),
        (3, 3, "generation.delta"),
        (4, 4, "generation.done"),
    ]
    assert log[0].data == {"message_id": turn.reply.id, "prompt_tokens": 24, "cached_tokens": 0}
    assert [event.data for event in log[1:3]] == [{"text": "h", "offset": 0}, {"text": "é", "offset": 1}]
    assert log[3].data == {
        "message_id": turn.reply.id,
        "status": "complete",
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": 24,
            "completion_tokens": 4,
            "total_tokens": 28,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "timings": {
            "queue_ms": 1.0,
            "prefill_ms": 2.0,
            "decode_ms": 3.0,
            "ttft_ms": 4.0,
            "total_ms": 6.0,
            "drafted_tokens": 8,
            "accepted_tokens": 5,
        },
    }
    user, reply = await rig.sessions.messages(OWNER, session.id)
    assert user == turn.message
    assert (reply.content, reply.status, reply.finish_reason, reply.parent_id) == ("hé", "complete", "stop", user.id)
    assert reply.usage == Usage(24, 0, 4)
    generation = await rig.turns.generation(OWNER, turn.generation.id)
    assert (generation.status, generation.finish_reason, generation.usage) == ("completed", "stop", reply.usage)
    assert message_json(reply)["created_at"].endswith("Z")


async def test_the_terminal_event_comes_after_the_commit(rig: Rig) -> None:
    session = await rig.session()
    turn = await rig.send(session, "hello")
    events = await rig.turns.events(OWNER, turn.generation.id)
    rig.engine.latest.finish()
    async for event in events:
        assert event.terminal
        assert [status for _, _, status in await rig.texts(session)] == ["complete", "complete"]
        await rig.ask(session, "the next one may follow at once")


async def test_notices_tell_what_was_created_and_changed(rig: Rig) -> None:
    session = await rig.session()
    notices = rig.broker.subscribe(session.id)
    turn = await rig.send(session, "  hello\nworld")
    rig.engine.latest.admit()
    rig.engine.latest.finish()
    created, updated, progress = [await anext(notices) for _ in range(3)]
    assert (created.type, created.generation_id) == ("message.created", turn.generation.id)
    assert created.data["message"] == message_json(turn.message)
    assert created.data["reply"]["status"] == "streaming"
    assert updated.type == "session.updated"
    assert (updated.data["title"], updated.data["active_leaf"]) == ("hello", turn.reply.id)
    assert (progress.type, progress.data) == ("generation.progress", {"processed": 32, "total": 32, "cached": 0})
    now = await rig.sessions.get(OWNER, session.id)
    assert (now.title, now.version, now.updated_at > session.updated_at) == ("hello", 2, True)


async def test_eight_turns_each_prompt_continues_the_last_prompt_and_reply(rig: Rig) -> None:
    session = await rig.session(system_prompt="Be brief.")
    rig.engine.reply = lambda request: f"answer {len(request.tokens)} \N{GRINNING FACE}"
    so_far = np.asarray([], dtype=np.int32)
    for number in range(8):
        rig.engine.codec.encoded.clear()
        turn = await rig.send(session, f"question {number}")
        await rig.log(turn)
        live = rig.engine.latest
        assert rig.engine.codec.encoded == ["Be brief."] * (number == 0) + [f"question {number}"]
        assert np.array_equal(live.request.tokens[: len(so_far)], so_far)
        assert live.cached >= len(so_far) // 16 * 16 - 16
        so_far = np.concatenate([live.request.tokens, np.asarray(live.output, dtype=np.int32)])
    assert len(await rig.sessions.messages(OWNER, session.id)) == 16
    assert set(rig.engine.codec.dates) == {session.created_at}


async def test_the_request_says_who_asks_and_how(rig: Rig) -> None:
    session = await rig.session(params={"temperature": 0.1, "top_p": 0.2, "stop_token_ids": [7]})
    await rig.send(session, "hi", params={"top_p": 0.9, "max_tokens": 5, "temperature": None})
    request = rig.engine.latest.request
    assert (request.namespace, request.owner) == ("", session.id)
    assert request.params == SamplingParams(temperature=0.1, top_p=0.9, max_tokens=5, stop_token_ids=(7,))
    theirs = await rig.sessions.create("ann")
    await rig.turns.start("ann", theirs.id, content="hi")
    assert rig.engine.latest.request.namespace == "ann"
    assert rig.engine.latest.params == rig.engine.info.default_params


async def test_a_message_may_change_the_adapter_of_its_session(open_rig: OpenRig) -> None:
    rig = await open_rig(ScriptedEngine(reply=lambda request: "fine", adapters=("ann", "bob")))
    session = await rig.session(params={"adapter": "ann"})
    for asked, expected in (({}, "ann"), ({"adapter": "bob"}, "bob"), ({"adapter": ""}, None), ({}, "ann")):
        await rig.log(await rig.send(session, "hi", params=asked))
        request = rig.engine.latest.request
        assert (request.adapter, request.namespace) == (expected, "")
    before = await rig.sessions.messages(OWNER, session.id)
    with pytest.raises(InvalidInput):
        await rig.send(session, "hi", params={"adapter": "eve"})
    with pytest.raises(InvalidInput):
        await rig.session(params={"adapter": "eve"})
    assert await rig.sessions.messages(OWNER, session.id) == before


async def test_an_adapter_that_is_gone_after_a_restart(open_rig: OpenRig) -> None:
    first = await open_rig(ScriptedEngine(adapters=("ann",)))
    session = await first.session(params={"adapter": "ann"})
    await first.close()
    rig = await open_rig(ScriptedEngine(reply=lambda request: "fine"))
    with pytest.raises(InvalidInput, match="adapter"):
        await rig.send(session, "hi")
    await rig.log(await rig.send(session, "hi", params={"adapter": ""}))
    assert rig.engine.latest.request.adapter is None


@pytest.mark.parametrize(("system_prompt", "opening"), [(None, "<default>"), ("", "<>"), ("Hi", "<Hi>")])
async def test_system_prompt_null_is_the_templates_own_and_empty_is_none(
    open_rig: OpenRig, system_prompt: str | None, opening: str
) -> None:
    rig = await open_rig(ScriptedEngine(LettersCodec(default_system="default")))
    await rig.send(await rig.session(system_prompt=system_prompt), "x")
    text = rig.engine.codec.decode(rig.engine.latest.request.tokens)
    assert text.startswith(f"system\n{opening[1:-1]}\nuser\nx\n")


REFUSALS: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"content": ""}, InvalidInput),
    ({"content": " \n\t"}, InvalidInput),
    ({"content": "a\0b"}, InvalidInput),
    ({"content": "a\ud800b"}, InvalidInput),
    ({"content": 5}, InvalidInput),
    ({"content": "x", "parent_id": "msg_unknown"}, InvalidInput),
    ({"content": "x", "client_msg_id": ""}, InvalidInput),
    ({"content": "x", "client_msg_id": "c" * 201}, InvalidInput),
    ({"content": "x", "params": {"best_of": 2}}, InvalidInput),
    ({"content": "x", "params": {"temperature": 3}}, InvalidInput),
    ({"content": "x" * 5000}, ContextOverflow),
    ({"content": "x", "params": {"max_tokens": 5000}}, ContextOverflow),
]


async def test_a_refusal_writes_no_row(rig: Rig) -> None:
    session = await rig.session()
    for fields, error in REFUSALS:
        with pytest.raises(error):
            await rig.turns.start(OWNER, session.id, **fields)
    assert await rig.sessions.messages(OWNER, session.id, tree=True) == []
    assert await rig.sessions.get(OWNER, session.id) == session
    assert rig.engine.all == []


@pytest.mark.parametrize("late", [False, True], ids=["at check", "at submit"])
@pytest.mark.parametrize("error", [QueueFull(64), EngineStopped("stopped"), RequestTooLong(9, None, 8, "pool")])
async def test_an_engine_that_refuses_leaves_no_row(rig: Rig, error: Exception, late: bool) -> None:
    session = await rig.session()

    def refuse(*_: object) -> None:
        raise error

    setattr(rig.engine, "submit" if late else "check", refuse)
    with pytest.raises(type(error)):
        await rig.send(session, "hello")
    assert await rig.sessions.messages(OWNER, session.id, tree=True) == []
    assert rig.turns.running(session.id) is None
    assert (await rig.sessions.get(OWNER, session.id)).title is None


class Watched:
    """Tells when a request's events have been read to the end."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def watch(self, events: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for event in events:
            yield event
        self.ended.set()


async def test_a_commit_that_fails_aborts_the_request(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    session, seen = await rig.session(), Watched()
    submit = rig.engine.submit

    def submit_then_lose_the_database(request: Any) -> Any:
        events = seen.watch(submit(request))
        monkeypatch.setattr(rig.broker, "open", lose)
        return events

    async def lose(*_: object) -> None:
        raise StorageBusy

    monkeypatch.setattr(rig.engine, "submit", submit_then_lose_the_database)
    with pytest.raises(StorageBusy):
        await rig.send(session, "hello")
    assert rig.engine.live == {}
    await asyncio.wait_for(seen.ended.wait(), 5)
    monkeypatch.undo()
    await rig.ask(session, "again")
    assert [content for _, content, _ in await rig.texts(session)] == ["again", "fine"]


async def test_one_turn_at_a_time_in_a_session(rig: Rig) -> None:
    session, other = await rig.session(), await rig.session()
    results = await asyncio.gather(*(rig.send(session, f"{n}") for n in range(5)), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["SessionBusy"] * 4 + ["Turn"]
    await rig.send(other, "elsewhere it goes on")
    with pytest.raises(SessionBusy):
        await rig.send(session, "still running")
    assert len(rig.engine.all) == 2
    assert len(await rig.sessions.messages(OWNER, session.id, tree=True)) == 2


BODY: dict[str, Any] = {"content": "hello", "client_msg_id": "c1", "params": {"seed": 1}}


async def test_a_repeated_client_msg_id_is_the_same_turn(rig: Rig) -> None:
    session = await rig.session()
    first = await rig.turns.start(OWNER, session.id, **BODY)
    assert await rig.turns.start(OWNER, session.id, **BODY) == first
    rig.engine.latest.finish()
    await rig.log(first)
    await rig.ask(session, "another turn in between")
    again = await rig.turns.start(OWNER, session.id, **BODY)
    assert (again.message, again.reply.id, again.generation.id) == (
        first.message,
        first.reply.id,
        first.generation.id,
    )
    assert again.generation.status == "completed"
    assert len(rig.engine.all) == 2
    elsewhere = await rig.turns.start(OWNER, (await rig.session()).id, **BODY)
    assert elsewhere.message.id != first.message.id


async def test_repeats_that_race_are_one_turn(rig: Rig) -> None:
    session = await rig.session()
    turns = await asyncio.gather(*(rig.turns.start(OWNER, session.id, **BODY) for _ in range(5)))
    assert len({turn.generation.id for turn in turns}) == 1
    assert len(rig.engine.all) == 1


@pytest.mark.parametrize("change", [{"content": "other"}, {"params": {"seed": 2}}, {"params": None}, {"parent_id": ""}])
async def test_a_client_msg_id_with_another_body_is_a_conflict(rig: Rig, change: dict[str, Any]) -> None:
    session = await rig.session()
    await rig.turns.start(OWNER, session.id, **BODY)
    with pytest.raises(IdempotencyConflict):
        await rig.turns.start(OWNER, session.id, **{**BODY, **change})


async def test_a_caller_that_goes_away_does_not_stop_the_turn(rig: Rig) -> None:
    session = await rig.session()
    submitted = asyncio.Event()
    submit = rig.engine.submit

    def noticed(request: Any) -> Any:
        submitted.set()
        return submit(request)

    rig.engine.submit = noticed  # type: ignore[method-assign]
    caller = asyncio.create_task(rig.send(session, "hello"))
    await submitted.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    generation_id = rig.turns.running(session.id)
    assert generation_id is not None
    rig.engine.latest.say("there")
    rig.engine.latest.finish()
    while rig.turns.running(session.id):
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, return_when=asyncio.FIRST_COMPLETED)
    assert await rig.texts(session) == [("user", "hello", "complete"), ("assistant", "there", "complete")]


async def test_a_reader_that_goes_away_does_not_stop_the_turn(rig: Rig) -> None:
    session = await rig.session()
    turn = await rig.send(session, "hello")
    reader = asyncio.create_task(rig.log(turn))
    rig.engine.latest.say("there")
    await rig.heard(turn, "there")
    reader.cancel()
    rig.engine.latest.finish()
    assert (await rig.log(turn))[-1].type == "generation.done"


async def test_a_parent_makes_a_branch(rig: Rig) -> None:
    session = await rig.session()
    first = await rig.ask(session, "one", "1")
    await rig.ask(session, "two", "2")
    await rig.turns.start(OWNER, session.id, content="other two", parent_id=first.reply.id)
    assert rig.engine.codec.decode(rig.engine.latest.request.tokens).count("two") == 1
    rig.engine.latest.finish()
    path = [content for _, content, _ in await rig.texts(session)]
    assert path == ["one", "1", "other two", ""]
    assert len(await rig.sessions.messages(OWNER, session.id, tree=True)) == 6


async def test_a_failed_reply_is_left_out_and_the_next_text_joins_the_one_before(rig: Rig) -> None:
    session = await rig.session()
    turn = await rig.send(session, "one")
    rig.engine.latest.say("half")
    rig.engine.latest.fail()
    await rig.log(turn)
    await rig.ask(session, "two", "2")
    assert rig.engine.codec.decode(rig.engine.latest.request.tokens) == "user\none\n\ntwo\nassistant\n"
    await rig.send(session, "three")
    assert rig.engine.codec.decode(rig.engine.latest.request.tokens).startswith("user\none\n\ntwo\nassistant\n2\n")


async def test_another_fingerprint_encodes_anew_and_stores_again(open_rig: OpenRig) -> None:
    rig = await open_rig()
    session = await rig.session(system_prompt="S")
    await rig.ask(session, "one", "1")
    await rig.close()
    rig = await open_rig(ScriptedEngine(LettersCodec("letters-2")))
    await rig.ask(session, "two", "2")
    assert rig.engine.codec.encoded == ["S", "one", "1", "two"]
    rig.engine.codec.encoded.clear()
    await rig.ask(session, "three", "3")
    assert rig.engine.codec.encoded == ["three"]


async def test_somebody_elses_things_do_not_exist(rig: Rig) -> None:
    session = await rig.session()
    turn = await rig.send(session, "hello")
    calls: list[Awaitable[Any]] = [
        rig.sessions.get("ann", session.id),
        rig.sessions.messages("ann", session.id),
        rig.sessions.delete("ann", session.id),
        rig.turns.start("ann", session.id, content="x"),
        rig.turns.cancel("ann", turn.generation.id),
        rig.turns.generation("ann", turn.generation.id),
        rig.turns.events("ann", turn.generation.id),
        rig.turns.snapshot("ann", turn.generation.id),
        rig.turns.generation(OWNER, "gen_unknown"),
    ]
    for call in calls:
        with pytest.raises(NotFound):
            await call
    assert rig.engine.aborted == []


async def test_a_snapshot_and_what_follows_are_the_whole(rig: Rig) -> None:
    session = await rig.session()
    turn = await rig.send(session, "hello")
    live = rig.engine.latest
    live.admit()
    live.say("abc")
    await rig.heard(turn, "abc")
    message, seq = await rig.turns.snapshot(OWNER, turn.generation.id)
    assert (message, seq) == (replace(turn.reply, content="abc"), 4)
    live.say("de")
    live.finish()
    rest = await rig.log(turn, after=seq)
    assert [event.seq for event in rest] == [5, 6, 7]
    assert message.content + "".join(event.data.get("text", "") for event in rest) == "abcde"
    message, seq = await rig.turns.snapshot(OWNER, turn.generation.id)
    assert (message.content, message.status, seq) == ("abcde", "complete", 7)
    assert await rig.log(turn, after=seq) == []


async def test_every_error_has_one_base() -> None:
    errors = [ContextOverflow(1, 2, 3), SessionBusy("s"), InvalidInput("f", "r"), NotFound("x"), StorageBusy()]
    assert all(isinstance(error, SessionsError) and str(error) for error in errors)
