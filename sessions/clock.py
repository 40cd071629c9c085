"""The wall clock as a plain function, so that tests can hold it still."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], datetime]
"""Gives the time now, as an aware datetime in UTC."""


def utc_now() -> datetime:
    return datetime.now(UTC)
