"""The shapes of /api/v1. Requests are strict and refuse unknown fields; responses stand here for /openapi.json."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from engine.api import MAX_ENTRIES

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


TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
"""A token id as JSON writes it for a key."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class NamedSchema(Strict):
    """A schema is always followed strictly; the name is for the client."""

    model_config = ConfigDict(serialize_by_alias=True)

    json_schema: dict[str, Any] = Field(alias="schema")
    name: Text | None = None
    description: Text | None = None
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class RegexFormat(Strict):
    """The whole reply matches the pattern (the syntax of Rust's regex crate, no look-around)."""

    type: Literal["regex"]
    pattern: Text


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat, Field(discriminator="type")]


class Sampling(BaseModel):
    """What both interfaces take under the same names. Which ids there are, the engine knows."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="only the k most likely tokens; 0 and -1: all")
    min_p: float | None = Field(None, ge=0, le=1, description="least share of the most likely token's probability")
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=MAX_ENTRIES)
    seed: int | None = Field(None, ge=0, lt=2**63)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_ENTRIES)] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = Field(None, max_length=64)
    response_format: ResponseFormat | None = None

    def sampling_json(self) -> dict[str, Any]:
        """What was given, as sessions/params.py takes it."""
        given = self.model_dump(exclude_unset=True, include=set(Sampling.model_fields))
        return {name: value for name, value in given.items() if value is not None}


class Params(Strict, Sampling):
    """Sampling parameters under their OpenAI names, and the adapter; what is absent falls back to the session, then to
    the model."""

    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    adapter: Text | None = Field(None, max_length=100, description='name of a loaded LoRA adapter; "": none')

    def given(self) -> dict[str, Any]:
        own = {"max_tokens": self.max_tokens, "adapter": self.adapter}
        return {**self.sampling_json(), **{name: value for name, value in own.items() if value is not None}}


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
    """Milliseconds, and how many tokens speculation guessed and kept."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    ttft_ms: float | None
    total_ms: float
    drafted_tokens: int
    accepted_tokens: int


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
