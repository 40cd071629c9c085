"""Ids: prefixed, of one shape, always growing."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from sessions.ids import RANDOM_BITS, IdFactory, encode


class Clock:
    now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


def test_the_shape() -> None:
    ids = IdFactory(Clock())
    for prefix, id in (("ses", ids.session()), ("msg", ids.message()), ("gen", ids.generation())):
        assert re.fullmatch(prefix + "_[0-9A-HJKMNP-TV-Z]{26}", id)


def test_ids_grow_within_a_millisecond_across_them_and_when_the_clock_goes_back() -> None:
    clock = Clock()
    ids = IdFactory(clock)
    made = []
    for step in (0, 0, 0, 1, 0, -5000, 0, 6000):
        clock.now += timedelta(milliseconds=step)
        made.append(ids.message())
    assert made == sorted(set(made))


def test_the_largest_random_part_carries_over() -> None:
    ids = IdFactory(Clock(), randbits=lambda bits: 2**bits - 1)
    assert ids.message() < ids.message() < ids.message()


def test_the_text_is_crockfords_base_32() -> None:
    assert encode(0) == "0" * 26
    assert encode(31) == "0" * 25 + "Z"
    assert encode((1 << 48 + RANDOM_BITS) - 1) == "7" + "Z" * 25
