"""What is saved of a reply: now and then while it runs, and once at its end."""

from __future__ import annotations

from dataclasses import dataclass

from engine.api import Failed, Timings, Usage
from engine.text.api import Encoded
from sessions.records import GenerationStatus, MessageStatus, Turn


@dataclass(frozen=True, slots=True)
class ReplySoFar:
    """A running reply as it is saved from time to time."""

    turn: Turn
    content: str
    encoded: Encoded


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """All that the end of a turn writes; encoded None where the text has no exact ids."""

    turn: Turn
    content: str
    encoded: Encoded | None
    message_status: MessageStatus
    generation_status: GenerationStatus
    finish_reason: str | None
    usage: Usage | None
    timings: Timings | None
    failure: Failed | None

    @property
    def error(self) -> str | None:
        return f"{self.failure.code}: {self.failure.message}" if self.failure else None
