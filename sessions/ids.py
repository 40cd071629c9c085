"""Prefixed ids that sort by the time they were made: 48 bits of milliseconds, 80 random bits, Crockford's base 32."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from sessions.clock import Clock

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
LENGTH = 26
RANDOM_BITS = 80


class IdFactory:
    """Makes ids that strictly grow within one factory, also inside a millisecond and when the clock is set back."""

    def __init__(self, clock: Clock, randbits: Callable[[int], int] = secrets.randbits) -> None:
        self._clock = clock
        self._randbits = randbits
        self._last = 0

    def session(self) -> str:
        return "ses_" + self._next()

    def message(self) -> str:
        return "msg_" + self._next()

    def generation(self) -> str:
        return "gen_" + self._next()

    def _next(self) -> str:
        milliseconds = int(self._clock().timestamp() * 1000)
        drawn = (milliseconds << RANDOM_BITS) | self._randbits(RANDOM_BITS)
        self._last = drawn if drawn >> RANDOM_BITS > self._last >> RANDOM_BITS else self._last + 1
        return encode(self._last)


def encode(value: int) -> str:
    """A number of up to 130 bits as 26 characters, most significant first."""
    return "".join(ALPHABET[(value >> shift) & 31] for shift in range(5 * (LENGTH - 1), -1, -5))
