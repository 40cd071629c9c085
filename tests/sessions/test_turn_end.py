"""How turns end otherwise: failures, empty replies, a database that is away, a server that stops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine.errors import EngineStopped
from sessions import StorageBusy, TurnSettings
from sessions.session_queries import message_path
from tests.sessions.letters_codec import END, token
from tests.sessions.rig import OWNER, QUICK, Rig
from tests.sessions.scripted_engine import Live

OpenRig = Callable[..., Awaitable[Rig]]

A, ASK, HALF = token(ord("a")), token(ord("?")), token(0xC3)


def cut(before: list[int], ids: list[int], text: str, unspelled: int) -> Callable[[Live], None]:
    """A stop string that begins inside a token."""

    def act(live: Live) -> None:
        live.say_ids(before)
        live.cut(ids, text, unspelled)
        live.close_with("stop")

    return act


def said(ids: list[int], end: Callable[[Live], object]) -> Callable[[Live], None]:
    def act(live: Live) -> None:
        live.say_ids(ids)
        end(live)

    return act


ENDS: list[tuple[str, Callable[[Live], object], tuple[str, str, str], str | None, list[int] | None]] = [
    ("length", said([A], lambda live: live.finish("length")), ("a", "complete", "completed"), "length", [A]),
    ("stop", said([A], lambda live: live.finish()), ("a", "complete", "completed"), "stop", [A, END]),
    ("nothing said", lambda live: live.finish(), ("", "complete", "completed"), "stop", [END]),
    (
        "length inside a character",
        said([A, HALF], lambda live: live.finish("length")),
        ("a", "complete", "completed"),
        "length",
        [A],
    ),
    (
        "stop inside a character",
        said([A, HALF], lambda live: live.finish()),
        ("a", "complete", "completed"),
        "stop",
        [A, END],
    ),
    ("a stop string after a token", cut([A], [A], "a", 0), ("aa", "complete", "completed"), "stop", [A, A]),
    (
        "a stop string inside a token",
        cut([A], [A], "aa?", 2),
        ("aaa?", "complete", "completed"),
        "stop",
        [A, A, A, ASK],
    ),
    ("a stop string inside the first token", cut([], [], "a?", 2), ("a?", "complete", "completed"), "stop", []),
    ("failed", said([A], lambda live: live.fail()), ("a", "failed", "failed"), None, None),
    (
        "engine closed",
        said([A], lambda live: live.fail("shutdown")),
        ("a", "interrupted", "interrupted"),
        None,
        [A],
    ),
]


@pytest.mark.parametrize(("act", "statuses", "reason", "ids"), [end[1:] for end in ENDS], ids=[end[0] for end in ENDS])
async def test_an_end_is_stored_and_told(
    rig: Rig,
    act: Callable[[Live], object],
    statuses: tuple[str, str, str],
    reason: str | None,
    ids: list[int] | None,
) -> None:
    session = await rig.session()
    turn = await rig.send(session, "hello")
    act(rig.engine.latest)
    last = (await rig.log(turn))[-1]
    generation = await rig.turns.generation(OWNER, turn.generation.id)
    async with rig.store.read() as db:
        reply = (await message_path(db, session.id, turn.reply.id))[-1]
    assert (reply.message.content, reply.message.status, generation.status) == statuses
    assert (reply.message.finish_reason, generation.finish_reason) == (reason, reason)
    assert (reply.encoded.ids.tolist() if reply.encoded else None) == ids
    if generation.status == "failed":
        assert last.data == {"message_id": turn.reply.id, "code": "boom", "message": "it broke"}
        assert generation.error == "boom: it broke"
    else:
        assert (last.type, last.data["status"]) == ("generation.done", reply.message.status)


async def test_an_engine_that_breaks_off_fails_the_turn(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing() -> Any:
        return
        yield

    monkeypatch.setattr(rig.engine, "submit", lambda request: nothing())
    session = await rig.session()
    turn = await rig.send(session, "hello")
    last = (await rig.log(turn))[-1]
    assert (last.type, last.data["code"]) == ("generation.failed", "internal_error")
    monkeypatch.undo()
    await rig.ask(session, "and on")


class Away:
    """Lets `times` write transactions fail, and then, if asked, every one."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch, times: float) -> None:
        self.tries = 0
        write = rig.store.write

        def refuse() -> Any:
            self.tries += 1
            if self.tries <= times:
                raise StorageBusy
            return write()

        monkeypatch.setattr(rig.store, "write", refuse)


async def test_saving_is_tried_until_it_works(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await rig.session()
    turn = await rig.send(session, "hello")
    away = Away(rig, monkeypatch, 4)
    rig.engine.latest.say("kept")
    rig.engine.latest.finish()
    assert (await rig.log(turn))[-1].type == "generation.done"
    assert away.tries == 5
    assert (await rig.texts(session))[-1] == ("assistant", "kept", "complete")


async def test_the_pauses_between_tries_double_up_to_a_limit(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await open_rig()
    pauses: list[float] = []

    async def note(pause: float) -> None:
        pauses.append(pause)

    settings = TurnSettings(save_interval=3600, first_retry=1, last_retry=5)
    turns = type(rig.turns)(rig.store, rig.engine, rig.broker, settings=settings, sleep=note)
    turn = await turns.start(OWNER, (await rig.session()).id, content="hello")
    Away(rig, monkeypatch, 5)
    rig.engine.latest.finish()
    async for _ in await turns.events(OWNER, turn.generation.id):
        pass
    assert pauses == [1, 2, 4, 5, 5]
    await turns.close(0)


async def test_text_that_cannot_be_saved_at_the_end_is_not_lost_silently(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = await open_rig(settings=TurnSettings(save_interval=3600, stop_wait=0.01, first_retry=3600))
    session = await rig.session()
    turn = await rig.send(session, "hello")
    rig.engine.latest.say("kept")
    await rig.heard(turn, "kept")
    await rig.turns.save_now()
    with monkeypatch.context() as patch:
        Away(rig, patch, float("inf"))
        rig.engine.latest.say(" lost")
        rig.engine.latest.finish()
        with caplog.at_level(logging.ERROR, "sessions"):
            await rig.close()
    assert "the last 5 characters of reply" in caplog.text
    rig = await open_rig()
    assert await rig.turns.recover() == 1
    assert (await rig.texts(session))[-1] == ("assistant", "kept", "interrupted")


async def test_close_saves_a_last_time_before_it_gives_up(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await open_rig(settings=TurnSettings(save_interval=3600, stop_wait=0.01, first_retry=3600))
    session = await rig.session()
    turn = await rig.send(session, "hello")
    rig.engine.latest.say("kept")
    Away(rig, monkeypatch, 1)
    rig.engine.latest.finish()
    await rig.heard(turn, "kept")
    await rig.turns.close(0.01)
    assert (await rig.texts(session))[-1] == ("assistant", "kept", "complete")
    assert (await rig.log(turn))[-1].type == "generation.done"


async def test_running_replies_are_saved_together_while_they_run(rig: Rig) -> None:
    sessions = [await rig.session() for _ in range(3)]
    for session in sessions:
        turn = await rig.send(session, "hello")
        rig.engine.latest.admit()
        rig.engine.latest.say("so far")
        await rig.heard(turn, "so far")
    await rig.turns.save_now()
    for session in sessions:
        assert (await rig.texts(session))[-1] == ("assistant", "so far", "streaming")
    assert (await rig.turns.generation(OWNER, turn.generation.id)).status == "running"


async def test_running_replies_are_saved_by_the_clock(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await open_rig(settings=TurnSettings(save_interval=0.01, first_retry=0))
    saved = asyncio.Event()
    monkeypatch.setattr("sessions.running_turn.RunningTurn.saved", lambda self, reply: saved.set())
    await rig.send(await rig.session(), "hello")
    rig.engine.latest.say("x")
    await asyncio.wait_for(saved.wait(), 10)


async def test_a_late_save_never_overwrites_the_end(rig: Rig) -> None:
    session = await rig.session()
    turn = await rig.send(session, "hello")
    rig.engine.latest.say("half")
    await rig.heard(turn, "half")
    saves = [asyncio.create_task(rig.turns.save_now()) for _ in range(3)]
    rig.engine.latest.say(" and half")
    rig.engine.latest.finish()
    await asyncio.gather(*saves, rig.log(turn))
    await rig.turns.save_now()
    assert (await rig.texts(session))[-1] == ("assistant", "half and half", "complete")


async def test_close_gives_grace_and_interrupts_the_rest(open_rig: OpenRig) -> None:
    rig = await open_rig(settings=TurnSettings(save_interval=3600, stop_wait=5, first_retry=0))
    quick, slow = await rig.session(), await rig.session()
    turns = [await rig.send(quick, "hello"), await rig.send(slow, "hello")]
    first, second = rig.engine.all
    for live in (first, second):
        live.say("text")
    first.finish()
    await rig.log(turns[0])
    await rig.turns.close(0.01)
    assert (await rig.texts(quick))[-1] == ("assistant", "text", "complete")
    assert (await rig.texts(slow))[-1] == ("assistant", "text", "interrupted")
    assert (await rig.log(turns[1]))[-1].data["status"] == "interrupted"
    assert rig.engine.aborted == [turns[1].generation.id]
    with pytest.raises(EngineStopped):
        await rig.send(quick, "too late")
    await rig.close()
    rig = await open_rig()
    assert await rig.turns.recover() == 0


async def test_close_does_not_wait_for_an_engine_that_never_answers(open_rig: OpenRig) -> None:
    rig = await open_rig(settings=TurnSettings(save_interval=3600, stop_wait=0.05, first_retry=0))
    rig.engine.obeys_abort = False
    session = await rig.session()
    turn = await rig.send(session, "hello")
    rig.engine.latest.say("text")
    await rig.heard(turn, "text")
    await rig.turns.close(0)
    assert (await rig.texts(session))[-1] == ("assistant", "text", "interrupted")
    assert (await rig.log(turn))[-1].data["status"] == "interrupted"


async def test_an_interrupted_answer_stays_in_the_next_prompt(open_rig: OpenRig) -> None:
    rig = await open_rig(settings=QUICK)
    session = await rig.session()
    turn = await rig.send(session, "hello")
    rig.engine.latest.say("half")
    await rig.heard(turn, "half")
    await rig.close()
    rig = await open_rig()
    await rig.send(session, "go on")
    text = rig.engine.codec.decode(rig.engine.latest.request.tokens)
    assert text == "user\nhello\nassistant\nhalf\nuser\ngo on\nassistant\n"
    assert rig.engine.codec.encoded == ["go on"]


async def test_a_row_that_claims_to_run_though_nobody_runs_it_does_not_block_the_session(rig: Rig) -> None:
    session = await rig.session()
    turn = await rig.send(session, "hello")
    rig.engine.obeys_abort = False
    rig.turns._running.pop(turn.generation.id)
    await rig.send(session, "go on")
    rig.engine.obeys_abort = True
    statuses = [status for _, _, status in await rig.texts(session)]
    assert statuses == ["complete", "interrupted", "complete", "streaming"]
