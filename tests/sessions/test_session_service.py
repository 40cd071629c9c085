"""Sessions: made, checked, listed page by page."""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from sessions import BadCursor, InvalidInput, Session, session_json
from sessions.content import title_of
from sessions.cursor import decode_cursor
from tests.sessions.rig import OWNER, Rig

OpenRig = Callable[..., Awaitable[Rig]]


async def test_what_was_made_is_what_is_read(rig: Rig) -> None:
    made = await rig.session(
        title="T", system_prompt="", params={"seed": 2**63 - 1, "top_p": None}, context_policy="error"
    )
    assert await rig.sessions.get(OWNER, made.id) == made
    assert (made.system_prompt, made.params, made.version, made.active_leaf) == ("", {"seed": 2**63 - 1}, 1, None)
    assert made.created_at.tzinfo is not None
    assert datetime.fromisoformat(session_json(made)["created_at"]) == made.created_at
    assert await rig.sessions.messages(OWNER, made.id) == []


UNUSABLE: list[dict[str, Any]] = [
    {"title": "a\0b"},
    {"title": 1},
    {"system_prompt": "\udfff"},
    {"context_policy": "summarize"},
    {"params": {"temperature": "hot"}},
    {"params": {"temperature": -1}},
    {"params": {"n": 2}},
]


async def test_what_cannot_be_used_is_refused(rig: Rig) -> None:
    for fields in UNUSABLE:
        with pytest.raises(InvalidInput):
            await rig.session(**fields)
    assert (await rig.sessions.list(OWNER)).data == ()


async def pages(rig: Rig, limit: int, between: Callable[[], Awaitable[object]] | None = None) -> list[list[Session]]:
    found, after = [], None
    while True:
        page = await rig.sessions.list(OWNER, limit=limit, after=after)
        found.append(list(page.data))
        after = page.next
        if after is None:
            return found
        if between is not None:
            await between()


@pytest.mark.parametrize(("count", "limit", "sizes"), [(0, 3, [0]), (3, 3, [3]), (4, 3, [3, 1]), (7, 3, [3, 3, 1])])
async def test_pages_cover_everything_once_the_newest_first(rig: Rig, count: int, limit: int, sizes: list[int]) -> None:
    made = [await rig.session() for _ in range(count)]
    await rig.sessions.create("ann")
    found = await pages(rig, limit)
    assert [len(page) for page in found] == sizes
    assert [session.id for page in found for session in page] == [session.id for session in reversed(made)]


async def test_cursors_are_stable_under_inserts(rig: Rig) -> None:
    made = [await rig.session() for _ in range(6)]
    found = await pages(rig, 2, between=rig.session)
    assert [session.id for page in found for session in page] == [session.id for session in reversed(made)]


async def test_sessions_of_the_same_instant_are_all_listed(open_rig: OpenRig) -> None:
    instant = datetime(2026, 1, 31, 12, tzinfo=UTC)
    rig = await open_rig(clock=lambda: instant)
    made = {(await rig.session()).id for _ in range(5)}
    found = [session.id for page in await pages(rig, 2) for session in page]
    assert (len(found), set(found)) == (5, made)


async def test_a_turn_brings_its_session_to_the_front(rig: Rig) -> None:
    first, second = await rig.session(), await rig.session()
    await rig.ask(first, "hello")
    assert [session.id for session in (await rig.sessions.list(OWNER)).data] == [first.id, second.id]


def forged(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value, separators=(",", ":")).encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    "cursor",
    [
        "",
        "x",
        "!!!",
        "é",
        forged([]),
        forged([1, 2]),
        forged(["1", "ses_" + "0" * 26]),
        forged([10**30, "ses_" + "0" * 26]),
        forged([1, "ses_\0"]),
        forged([True, "ses_" + "0" * 26]),
        forged([1, "ses_" + "0" * 26]) + "=",
        forged({"a": 1}),
    ],
)
def test_a_foreign_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(BadCursor):
        decode_cursor(cursor)


async def test_the_page_has_bounds(rig: Rig) -> None:
    for limit in (0, -1, 101):
        with pytest.raises(InvalidInput):
            await rig.sessions.list(OWNER, limit=limit)
    with pytest.raises(BadCursor):
        await rig.sessions.list(OWNER, after="x")


@pytest.mark.parametrize(
    ("content", "title"),
    [("hello", "hello"), ("\n  two\nlines", "two"), ("x" * 70, "x" * 60), ("😀" * 61, "😀" * 60), ("a\r\nb", "a")],
)
def test_a_title_is_the_first_line_cut(content: str, title: str) -> None:
    assert title_of(content) == title


async def test_the_first_message_names_an_untitled_session(rig: Rig) -> None:
    session = await rig.session()
    await rig.ask(session, "hello\nworld")
    await rig.ask(session, "later text changes nothing")
    assert (await rig.sessions.get(OWNER, session.id)).title == "hello"


async def test_a_given_title_stays(rig: Rig) -> None:
    session = await rig.session(title="mine")
    await rig.ask(session, "hello")
    assert (await rig.sessions.get(OWNER, session.id)).title == "mine"


async def test_times_are_utc_whatever_the_clock_says(open_rig: OpenRig) -> None:
    rig = await open_rig(clock=lambda: datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))))
    session = await rig.session()
    read = await rig.sessions.get(OWNER, session.id)
    assert (read.created_at, read.created_at.utcoffset()) == (datetime(2026, 1, 1, tzinfo=UTC), timedelta(0))
