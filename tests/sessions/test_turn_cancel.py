"""Cancelling at every point: the stored text is exactly the logged text, the ids exactly that text's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from engine.text.api import Encoded
from sessions.session_queries import message_path
from tests.sessions.letters_codec import MIXED, SILENT, token
from tests.sessions.rig import OWNER, Rig
from tests.sessions.scripted_engine import Live


async def stored_ids(rig: Rig, session_id: str, message_id: str) -> Encoded | None:
    async with rig.store.read() as db:
        return (await message_path(db, session_id, message_id))[-1].encoded


def letters(text: str) -> list[int]:
    return [token(byte) for byte in text.encode()]


POINTS: list[tuple[str, Callable[[Live], object], str, list[int]]] = [
    ("queued", lambda live: None, "", []),
    ("admitted", lambda live: live.admit(), "", []),
    ("one delta", lambda live: live.say("a"), "a", letters("a")),
    ("many deltas", lambda live: live.say("hello é"), "hello é", letters("hello é")),
    ("inside a character", lambda live: live.say_ids(letters("aé")[:-1]), "a", letters("a")),
    ("only half a character", lambda live: live.say_ids(letters("é")[:1]), "", []),
    ("inside a long character", lambda live: live.say_ids(letters("ab😀")[:-1]), "ab", letters("ab")),
    ("a token with half a character", lambda live: live.say_ids([*letters("a"), MIXED]), "a ", letters("a ")),
    ("that token completed", lambda live: live.say_ids([MIXED, token(0xA9)]), " é", [MIXED, token(0xA9)]),
    ("silent ids last", lambda live: live.say_ids([*letters("a"), SILENT]), "a", letters("a")),
    ("silent ids inside", lambda live: live.say_ids([SILENT, *letters("a")]), "a", [SILENT, *letters("a")]),
    ("U+0000", lambda live: live.say("a\0"), "a\ufffd", letters("a\0")),
]


@pytest.mark.parametrize(("act", "text", "ids"), [point[1:] for point in POINTS], ids=[point[0] for point in POINTS])
async def test_cancel_keeps_exactly_the_logged_text(
    rig: Rig, act: Callable[[Live], object], text: str, ids: list[int]
) -> None:
    session = await rig.session()
    turn = await rig.send(session, "hello")
    act(rig.engine.latest)
    generation = await rig.turns.cancel(OWNER, turn.generation.id)
    assert (generation.status, generation.finish_reason) == ("cancelled", "cancelled")
    log = await rig.log(turn)
    assert "".join(event.data.get("text", "") for event in log) == text
    assert (log[-1].type, log[-1].data["status"]) == ("generation.done", "cancelled")
    assert (await rig.texts(session))[-1] == ("assistant", text, "cancelled")
    encoded = await stored_ids(rig, session.id, turn.reply.id)
    assert encoded is not None
    assert encoded.ids.tolist() == ids
    assert await rig.turns.cancel(OWNER, turn.generation.id) == generation
    assert rig.engine.aborted == [turn.generation.id]


async def test_the_next_prompt_holds_the_cancelled_text_and_no_token_more(rig: Rig) -> None:
    session = await rig.session()
    turn = await rig.send(session, "hello")
    live = rig.engine.latest
    live.say_ids(letters("ab😀")[:-1])
    await rig.turns.cancel(OWNER, turn.generation.id)
    await rig.send(session, "next")
    continued = np.concatenate([live.request.tokens, np.asarray(letters("ab"), dtype=np.int32)])
    following = rig.engine.latest.request.tokens
    assert np.array_equal(following[: len(continued)], continued)
    assert rig.engine.codec.decode(following).endswith("assistant\nab\nuser\nnext\nassistant\n")


async def test_cancel_after_the_end_changes_nothing(rig: Rig) -> None:
    session = await rig.session()
    turn = await rig.ask(session, "hello", "there")
    generation = await rig.turns.cancel(OWNER, turn.generation.id)
    assert generation.status == "completed"
    assert rig.engine.aborted == []


async def test_cancels_that_race_and_a_last_delta_agree(rig: Rig) -> None:
    session = await rig.session()
    turn = await rig.send(session, "hello")
    live = rig.engine.latest
    rig.engine.obeys_abort = False
    live.say("ab")
    cancels = [asyncio.create_task(rig.turns.cancel(OWNER, turn.generation.id)) for _ in range(3)]
    await rig.heard(turn, "ab")
    live.say("c")
    live.finish("cancelled")
    assert {generation.status for generation in await asyncio.gather(*cancels)} == {"cancelled"}
    log = await rig.log(turn)
    assert "".join(event.data.get("text", "") for event in log) == "abc"
    assert [event.terminal for event in log].count(True) == 1
    assert (await rig.texts(session))[-1] == ("assistant", "abc", "cancelled")


async def test_an_engine_that_finished_first_wins(rig: Rig) -> None:
    session = await rig.session()
    turn = await rig.send(session, "hello")
    rig.engine.latest.say("done")
    rig.engine.latest.finish()
    generation = await rig.turns.cancel(OWNER, turn.generation.id)
    assert generation.status == "completed"
    assert (await rig.texts(session))[-1] == ("assistant", "done", "complete")
