"""The shapes of /api/v1. Requests are strict and refuse unknown fields; responses stand here for /openapi.json."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

_SURROGATE = re.compile("[\ud800-\udfff]")


def storable(text: str) -> str:
    """Text that any database and tokenizer can take."""
    if "\0" in text:
        raise ValueError("must not contain U+0000")
    if _SURROGATE.search(text):
        raise ValueError("must not contain lone surrogates")
    return text


Text = Annotated[str, AfterValidator(storable)]


Id = Annotated[str, Field(max_length=100), AfterValidator(storable)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Params(Strict):
    """Sampling parameters under their OpenAI names, and the adapter; what is absent falls back to the session, then to
    the model."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = Field(None, max_length=64)
    adapter: Text | None = Field(None, max_length=100, description='name of a loaded LoRA adapter; "": none')

    def given(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class CreateSession(Strict):
    title: Text | None = Field(None, max_length=200)
    system_prompt: Text | None = Field(None, description='null: the model\'s own default; "": none')
    params: Params | None = None
    context_policy: Literal["window", "error"] = "window"


class CreateMessage(Strict):
    content: Text = Field(min_length=1)
    parent_id: Id | None = Field(None, description="the message to answer to; null continues the active branch")
    client_msg_id: Text | None = Field(None, min_length=1, max_length=200, description="the same id twice is one turn")
    params: Params | None = None


class ListSessions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    limit: int = Field(50, ge=1, le=100)
    after: str | None = None


class ListMessages(BaseModel):
    model_config = ConfigDict(extra="forbid")
    tree: bool = False


class ReadEvents(BaseModel):
    model_config = ConfigDict(extra="forbid")
    after: int | None = Field(None, ge=0, lt=2**53)


class CachedTokens(Strict):
    cached_tokens: int


class UsageOut(Strict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TimingsOut(Strict):
    """Milliseconds."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    ttft_ms: float | None
    total_ms: float


class CutOut(Strict):
    first_kept: str
    dropped_messages: int
    dropped_tokens: int


class SessionOut(Strict):
    id: str
    title: str | None
    system_prompt: str | None
    params: dict[str, Any]
    context_policy: str
    pinned: bool
    archived: bool
    active_leaf: str | None
    created_at: str
    updated_at: str


class SessionPage(Strict):
    data: list[SessionOut]
    has_more: bool
    next: str | None


class MessageOut(Strict):
    id: str
    session_id: str
    parent_id: str | None
    role: Literal["user", "assistant"]
    content: str
    status: Literal["complete", "streaming", "interrupted", "cancelled", "failed"]
    finish_reason: str | None
    usage: UsageOut | None
    timings: TimingsOut | None
    created_at: str
    cut: CutOut | None


class MessageList(Strict):
    data: list[MessageOut]


class GenerationOut(Strict):
    id: str
    session_id: str
    message_id: str
    status: Literal["queued", "running", "completed", "cancelled", "interrupted", "failed"]
    finish_reason: str | None
    usage: UsageOut | None
    timings: TimingsOut | None


class TurnOut(Strict):
    message: MessageOut
    reply: MessageOut
    generation: GenerationOut


class Limits(Strict):
    max_message_bytes: int


class InfoOut(Strict):
    """context_length is null until the model is loaded."""

    model: str
    context_length: int | None
    version: str
    limits: Limits
    page_size: int
    prefix_cache: bool
    adapters: list[str]


class FieldErrorOut(Strict):
    field: str
    reason: str


class ProblemOut(Strict):
    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: str
    errors: list[FieldErrorOut]
