"""What sessions/ hands out: frozen records, complete at construction. Times are aware and in UTC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

from engine.api import Timings, Usage

MessageRole = Literal["user", "assistant"]
MessageStatus = Literal["complete", "streaming", "interrupted", "cancelled", "failed"]
GenerationStatus = Literal["queued", "running", "completed", "cancelled", "interrupted", "failed"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation. system_prompt: None is the template's own default, "" is none at all.

    active_leaf: the last message of the branch that a next turn continues. version grows with every change of the row.
    """

    id: str
    owner: str
    title: str | None
    system_prompt: str | None
    params: Mapping[str, Any]
    context_policy: str
    active_leaf: str | None
    created_at: datetime
    updated_at: datetime
    pinned: bool = False
    archived: bool = False
    version: int = 1


@dataclass(frozen=True, slots=True)
class ContextCut:
    """What was left out of the context from one message on, down its path; both counts run from the path's start."""

    first_kept: str
    dropped_messages: int
    dropped_tokens: int


@dataclass(frozen=True, slots=True)
class Message:
    """A node of the message tree; parent_id None is a root. cut is set where a context cut was taken."""

    id: str
    session_id: str
    parent_id: str | None
    role: MessageRole
    content: str
    status: MessageStatus
    finish_reason: str | None
    usage: Usage | None
    timings: Timings | None
    created_at: datetime
    cut: ContextCut | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One run of the engine, writing the message `message_id`. error: "code: message" when it failed."""

    id: str
    session_id: str
    message_id: str
    status: GenerationStatus
    finish_reason: str | None
    usage: Usage | None
    timings: Timings | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """The user's message, the assistant's reply to it, and the generation that writes the reply."""

    message: Message
    reply: Message
    generation: Generation


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some of a list; `next` is the cursor of what follows, None at the end."""

    data: tuple[T, ...]
    next: str | None
