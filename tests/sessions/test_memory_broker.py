"""Event logs and notices: no gap, no double, no waiting for slow readers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from sessions import LoggedEvent, LogGone, MemoryBroker, SessionEvent, SubscriberLagged

STARTED: dict[str, Any] = {"message_id": "m", "prompt_tokens": 1, "cached_tokens": 0}
DONE: dict[str, Any] = {"message_id": "m", "status": "complete"}


async def delta(broker: MemoryBroker, text: str) -> None:
    offset = len((await broker.snapshot("g")).text)
    await broker.append("g", "generation.delta", {"text": text, "offset": offset})


async def filled(broker: MemoryBroker, text: str, *, ended: bool = True) -> MemoryBroker:
    """A log with `started`, one delta for each character, and the end."""
    await broker.open("g", "s")
    await broker.append("g", "generation.started", STARTED)
    for character in text:
        await delta(broker, character)
    if ended:
        await broker.append("g", "generation.done", DONE)
    return broker


async def read(broker: MemoryBroker, after: int = 0) -> list[LoggedEvent]:
    return [event async for event in await broker.read("g", after)]


def spans(events: list[LoggedEvent]) -> list[tuple[int, int, str]]:
    return [(event.seq_from, event.seq, event.data.get("text", event.type.split(".")[1])) for event in events]


@pytest.mark.parametrize(
    ("merge_above", "after", "expected"),
    [
        (64, 0, [(1, 1, "started"), (2, 2, "a"), (3, 3, "b"), (4, 4, "c"), (5, 5, "done")]),
        (64, 3, [(4, 4, "c"), (5, 5, "done")]),
        (64, 5, []),
        (64, -1, [(1, 1, "started"), (2, 2, "a"), (3, 3, "b"), (4, 4, "c"), (5, 5, "done")]),
        (1, 0, [(1, 1, "started"), (2, 4, "abc"), (5, 5, "done")]),
        (1, 2, [(3, 4, "bc"), (5, 5, "done")]),
    ],
)
async def test_reading_from_anywhere(merge_above: int, after: int, expected: list[tuple[int, int, str]]) -> None:
    broker = await filled(MemoryBroker(merge_above=merge_above), "abc")
    assert spans(await read(broker, after)) == expected


@pytest.mark.parametrize("after", [6, 99, 2**70])
async def test_a_reader_that_is_ahead_has_seen_another_log(after: int) -> None:
    broker = await filled(MemoryBroker(), "abc")
    with pytest.raises(LogGone):
        await broker.read("g", after)


async def test_merged_deltas_keep_the_first_offset() -> None:
    broker = await filled(MemoryBroker(merge_above=0), "ab😀d")
    [merged] = [event for event in await read(broker, 2) if event.type == "generation.delta"]
    assert merged.data == {"text": "b😀d", "offset": 1}


async def test_a_slow_reader_gets_everything_in_fewer_events_and_holds_nobody_up() -> None:
    broker = MemoryBroker(merge_above=4)
    await filled(broker, "", ended=False)
    events = await broker.read("g")
    heard = [await anext(events)]
    for number in range(1000):
        await delta(broker, f"{number},")
    await broker.append("g", "generation.done", DONE)
    heard += [event async for event in events]
    assert len(heard) == 3
    assert all(event.seq_from == before.seq + 1 for before, event in pairwise(heard))
    assert heard[1].data["text"] == "".join(f"{number}," for number in range(1000))


async def test_readers_follow_live_and_all_see_the_same() -> None:
    broker = await filled(MemoryBroker(), "", ended=False)
    readers = [asyncio.create_task(read(broker)) for _ in range(3)]
    for character in "abc":
        await delta(broker, character)
        for _ in readers:
            await asyncio.wait(readers, timeout=0)
    await broker.append("g", "generation.done", DONE)
    for reader in readers:
        events = await reader
        assert [event.seq for event in events] == list(range(1, events[-1].seq + 1))
        assert "".join(event.data.get("text", "") for event in events) == "abc"


async def test_a_snapshot_and_the_rest_are_the_whole() -> None:
    broker = await filled(MemoryBroker(), "abc", ended=False)
    text, seq = await broker.snapshot("g")
    await delta(broker, "d")
    await broker.append("g", "generation.done", DONE)
    assert (text, seq) == ("abc", 4)
    assert spans(await read(broker, seq)) == [(5, 5, "d"), (6, 6, "done")]


async def test_nothing_follows_the_end() -> None:
    broker = await filled(MemoryBroker(), "a")
    with pytest.raises(ValueError, match="terminal"):
        await broker.append("g", "generation.delta", {"text": "x", "offset": 1})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("ended", "seconds", "kept"), [(True, 599, True), (True, 600, False), (False, 10**6, True)])
async def test_a_log_is_kept_while_running_and_ten_minutes(ended: bool, seconds: float, kept: bool) -> None:
    clock = Clock()
    broker = await filled(MemoryBroker(clock=clock), "a", ended=ended)
    clock.now = seconds
    if kept:
        assert (await broker.snapshot("g")).text == "a"
    else:
        with pytest.raises(LogGone):
            await broker.snapshot("g")
        with pytest.raises(LogGone):
            await broker.read("g")


async def test_a_reader_under_way_finishes_though_the_log_is_dropped() -> None:
    broker = await filled(MemoryBroker(), "abc")
    events = await broker.read("g")
    await anext(events)
    await broker.forget("s")
    assert len([event async for event in events]) == 4
    with pytest.raises(LogGone):
        await broker.read("g")


def notice(type: Any, session_id: str = "s", **data: Any) -> SessionEvent:
    return SessionEvent(type, session_id, None, data)


async def test_notices_reach_every_subscriber_of_that_session_only() -> None:
    broker = MemoryBroker()
    first, second, other = broker.subscribe("s"), broker.subscribe("s"), broker.subscribe("t")
    await broker.publish(notice("session.updated", title="x"))
    await broker.publish(notice("session.deleted", "t"))
    assert [(await anext(first)).type, (await anext(second)).type] == ["session.updated"] * 2
    assert (await anext(other)).type == "session.deleted"
    first.close()
    await broker.publish(notice("session.deleted"))
    assert [event async for event in first] == []
    assert (await anext(second)).type == "session.deleted"


async def test_a_waiting_subscriber_is_woken_by_a_notice_and_by_close() -> None:
    broker = MemoryBroker()
    subscription = broker.subscribe("s")
    waiting = asyncio.create_task(anext(subscription))
    await asyncio.wait([waiting], timeout=0)
    await broker.publish(notice("session.updated"))
    assert (await waiting).type == "session.updated"
    ending = asyncio.create_task(anext(subscription, None))
    await asyncio.wait([ending], timeout=0)
    subscription.close()
    assert await ending is None


FULL: list[tuple[list[str], Callable[[list[str]], bool]]] = [
    (["generation.progress"] * 9, lambda types: types == ["generation.progress"] * 3),
    (
        ["generation.progress", "session.updated", "generation.progress", "message.created", "session.updated"],
        lambda types: types == ["session.updated", "message.created", "session.updated"],
    ),
    (["session.updated"] * 3, lambda types: len(types) == 3),
]


@pytest.mark.parametrize(("sent", "fits"), FULL)
async def test_progress_goes_first_when_a_queue_is_full(sent: list[Any], fits: Callable[[list[str]], bool]) -> None:
    broker = MemoryBroker(queue_limit=3)
    subscription = broker.subscribe("s")
    for type in sent:
        await broker.publish(notice(type))
    heard = [(await anext(subscription)).type for _ in range(3)]
    assert fits(list(heard))


async def test_a_subscriber_that_missed_something_is_told() -> None:
    broker = MemoryBroker(queue_limit=3)
    subscription = broker.subscribe("s")
    for _ in range(4):
        await broker.publish(notice("session.updated"))
    with pytest.raises(SubscriberLagged):
        await anext(subscription)
