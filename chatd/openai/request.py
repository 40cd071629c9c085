"""What POST /v1/chat/completions takes. What is known and built is typed; the rest must not change the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from chatd.errors import InvalidParameter, UnsupportedParameter
from chatd.schemas import Sampling, Strict, Text
from engine.api import MAX_TOP_LOGPROBS, SamplingParams
from engine.text.api import ChatMessage, Role
from sessions.errors import InvalidInput
from sessions.params import resolve_params

_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "store": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}
"""Parameters that are accepted with the values that mean nothing, and refused with any other."""


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, value: Any) -> Any:
        """An answer that a client sends back may carry fields like `refusal: null` and `tool_calls: []`."""
        if isinstance(value, dict):
            return {k: v for k, v in value.items() if k in ("role", "content") or (v is not None and v != [])}
        return value

    @model_validator(mode="after")
    def _only_answers_are_empty(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError("only an assistant message may have no content")
        return self

    def plain(self) -> ChatMessage:
        """Parts are one text, joined with nothing between; no content is an empty text."""
        role: Role = "system" if self.role == "developer" else self.role
        parts = self.content or ""
        return ChatMessage(role, parts if isinstance(parts, str) else "".join(part.text for part in parts))


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class ChatCompletionRequest(Sampling):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: Text
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=0, lt=2**31)
    n: int | None = Field(None, ge=1, le=128, description="how many choices; at most what the engine runs at once")
    add_generation_prompt: bool | None = Field(
        None, description="whether the prompt ends with the header of an answer; true unless a message is continued"
    )
    continue_final_message: bool | None = Field(
        None, description="the last message is an answer without its end, which the choices go on with"
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Text | None = Field(
        None, max_length=200, description="requests share cached pages only with equal salts"
    )
    user: Text | None = Field(None, description="accepted without effect")
    metadata: dict[str, Any] | None = Field(None, description="accepted without effect")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def namespace(self) -> str:
        """The cache namespace; without a salt the one that sessions use."""
        return f"salt:{self.cache_salt}" if self.cache_salt else ""

    def refuse_unsupported(self) -> None:
        """Raises UnsupportedParameter for the first parameter that would change the answer and is not built."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and not any(value == neutral for neutral in _NEUTRAL.get(name, ())):
                raise UnsupportedParameter(name)

    def continues(self) -> bool:
        """Whether the last message is to be continued. Raises InvalidParameter where that cannot be."""
        if not self.continue_final_message:
            return False
        if self.add_generation_prompt:
            raise InvalidParameter("add_generation_prompt", "must not be true where a message is continued")
        if self.messages[-1].role != "assistant":
            raise InvalidParameter("continue_final_message", "the last message must be an assistant's")
        return True

    def chat(self) -> list[ChatMessage]:
        return [message.plain() for message in self.messages]

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """Raises InvalidParameter."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if self.max_tokens is not None and self.max_tokens != limit:
            raise InvalidParameter("max_tokens", "differs from max_completion_tokens")
        if self.top_logprobs and not self.logprobs:
            raise InvalidParameter("top_logprobs", "needs logprobs to be true")
        try:
            params = resolve_params(defaults, {**self.sampling_json(), "max_tokens": limit})
        except InvalidInput as error:
            raise _invalid(error) from None
        return dataclasses.replace(params, logprobs=self.top_logprobs or 0) if self.logprobs else params


def _invalid(error: InvalidInput) -> InvalidParameter:
    """The same under the parameter's own name, with which SamplingParams begins its messages."""
    if error.field != "params":
        return InvalidParameter(error.field.removeprefix("params."), error.reason)
    name, _, reason = error.reason.partition(" ")
    return InvalidParameter(name, reason)
