"""What clients may send over the socket. Server frames are plain dicts, made where they are sent."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from chatd.schemas import CreateMessage, Id, Strict

FrameId = Annotated[str, Field(max_length=200)]


class UnparseableFrame(Exception):
    """The text is no JSON at all; the connection ends with 4400."""


class ResumePoint(Strict):
    generation: Id
    last_seq: int = Field(ge=0)


class ResumeData(Strict):
    resume: list[ResumePoint] = Field(default=[], max_length=100)


class Frame(Strict):
    id: FrameId | None = None


class Hello(Frame):
    type: Literal["hello"]
    resume: list[ResumePoint] = Field(default=[], max_length=100)
    data: ResumeData = ResumeData()

    @property
    def points(self) -> list[ResumePoint]:
        return [*self.resume, *self.data.resume]


class Subscribe(Frame):
    type: Literal["subscribe"]
    session: Id


class Unsubscribe(Frame):
    type: Literal["unsubscribe"]
    session: Id


class MessageCreate(Frame):
    type: Literal["message.create"]
    session: Id
    data: CreateMessage


class GenerationCancel(Frame):
    type: Literal["generation.cancel"]
    generation: Id


class Ping(Frame):
    type: Literal["ping"]


ClientFrame = Hello | Subscribe | Unsubscribe | MessageCreate | GenerationCancel | Ping

_CLIENT_FRAME: TypeAdapter[ClientFrame] = TypeAdapter(Annotated[ClientFrame, Field(discriminator="type")])


def parse_json(text: str) -> Any:
    """Raises UnparseableFrame."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UnparseableFrame from None


def parse_frame(value: Any) -> ClientFrame:
    """Raises pydantic's ValidationError."""
    return _CLIENT_FRAME.validate_python(value)


def frame_id(value: Any) -> str | None:
    """The id of a frame that may be bad in every other way."""
    found = value.get("id") if isinstance(value, dict) else None
    return found if isinstance(found, str) and len(found) <= 200 and found.isprintable() else None


def frame_text(frame: dict[str, Any]) -> str:
    return json.dumps(frame, ensure_ascii=False, separators=(",", ":"))
