"""One chat completion under way: engine events in, OpenAI objects out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from chatd.errors import GenerationFailed, problem_of
from chatd.openai.logprobs import logprobs_json
from engine.api import Delta, Engine, Event, Failed, Finished, FinishReason, GenerateRequest, SampledLogprob
from sessions import usage_json

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one completion repeats. created: seconds since 1970."""

    id: str
    model: str
    created: int


@dataclass(frozen=True, slots=True)
class Opening:
    """The message that is continued: its text, and how many ids at the end of the prompt spell it."""

    text: str = ""
    tokens: int = 0


@dataclass(slots=True)
class Choice:
    """One choice so far. unspelled: as in `Delta`, characters at the end of its text that no id spells."""

    index: int
    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[SampledLogprob] = field(default_factory=list)
    unspelled: int = 0
    reason: FinishReason | None = None

    def take(self, delta: Delta) -> None:
        self.ids.extend(delta.ids)
        self.text.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.unspelled = delta.unspelled
        self.reason = delta.reason


class Completion:
    """Made when the engine has accepted the request. Use either `answer` or `stream`, once, and to its end."""

    def __init__(
        self,
        head: Head,
        engine: Engine,
        request: GenerateRequest,
        events: AsyncIterator[Event],
        opening: Opening | None = None,
    ) -> None:
        """opening: what a client will send back before the answer, as one text with it; None: nothing is remembered."""
        self._head = head
        self._engine = engine
        self._request = request
        self._events = events
        self._opening = opening
        self._choices = [Choice(index) for index in range(request.n)]

    def abort(self) -> None:
        """The client has gone: the engine stops within a step, and then the events end."""
        self._engine.abort(self._request.id)

    async def answer(self) -> dict[str, Any]:
        """The whole completion. Raises GenerationFailed."""
        async for event in self._events:
            if isinstance(event, Delta):
                self._choices[event.index].take(event)
            elif isinstance(event, Finished):
                self._finish(event)
                return self._whole(event)
            elif isinstance(event, Failed):
                raise GenerationFailed(event.code)
        raise GenerationFailed("no_end")

    async def stream(self, include_usage: bool) -> AsyncIterator[bytes]:
        """A role chunk for each choice, deltas, a chunk with finish_reason for each choice as it ends, the usage if
        asked for, [DONE]; or an error, and the end."""
        before, after = self._frame("chat.completion.chunk", include_usage)

        def chunk(
            index: int,
            delta: str,
            reason: FinishReason | None = None,
            logprobs: tuple[SampledLogprob, ...] = (),
        ) -> bytes:
            ended = "null" if reason is None else f'"{_reason(reason)}"'
            told = _compact(logprobs_json(logprobs)) if logprobs else "null"
            choice = f'{{"index":{index},"delta":{delta},"logprobs":{told},"finish_reason":{ended}}}'
            return f'data: {before}"choices":[{choice}]{after}}}\n\n'.encode()

        for choice in self._choices:
            yield chunk(choice.index, '{"role":"assistant","content":""}')
        try:
            async for event in self._events:
                if isinstance(event, Delta):
                    choice = self._choices[event.index]
                    choice.take(event)
                    if event.text or event.logprobs:
                        yield chunk(event.index, f'{{"content":{_compact(event.text)}}}', logprobs=event.logprobs)
                    if event.reason is not None:
                        yield chunk(event.index, "{}", event.reason)
                elif isinstance(event, Finished):
                    for choice in self._finish(event):
                        yield chunk(choice.index, "{}", choice.reason)
                    if include_usage:
                        usage = json.dumps(usage_json(event.usage), separators=(",", ":"))
                        yield f'data: {before}"choices":[],"usage":{usage}}}\n\n'.encode()
                    yield DONE
                elif isinstance(event, Failed):
                    raise GenerationFailed(event.code)
        except GenerationFailed as error:
            yield f"data: {json.dumps(problem_of(error).openai_json())}\n\n".encode()

    def _finish(self, end: Finished) -> list[Choice]:
        """Remembers what was said; gives the choices that had not told their end."""
        if end.reason != "cancelled":
            for choice in self._choices:
                self._remember(choice)
        untold = [choice for choice in self._choices if choice.reason is None]
        for choice in untold:
            choice.reason = end.reason
        return untold

    def _remember(self, choice: Choice) -> None:
        if not choice.ids or self._opening is None:
            return
        asked, codec, text = self._request, self._engine.codec, "".join(choice.text)
        rest = codec.encode(text[len(text) - choice.unspelled :], continued=True) if choice.unspelled else ()
        start = len(asked.tokens) - self._opening.tokens
        ids = [int(token) for token in (*asked.tokens[start:], *choice.ids, *rest)]
        codec.remember(asked.namespace, asked.tokens[:start], ids, self._opening.text + text)

    def _frame(self, kind: str, include_usage: bool) -> tuple[str, str]:
        """What stands before `"choices"` and after it in every chunk."""
        head = {"id": self._head.id, "object": kind, "created": self._head.created, "model": self._head.model}
        opened = json.dumps(head, separators=(",", ":")).removesuffix("}") + ","
        return opened, ',"usage":null' if include_usage else ""

    def _whole(self, end: Finished) -> dict[str, Any]:
        told = self._request.params.logprobs
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
                "logprobs": None if told is None else logprobs_json(choice.logprobs),
                "finish_reason": _reason(choice.reason or end.reason),
            }
            for choice in self._choices
        ]
        return {
            "id": self._head.id,
            "object": "chat.completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": choices,
            "usage": usage_json(end.usage),
        }


def _reason(reason: FinishReason) -> str:
    """Nobody but the client cancels a completion, and it does not see the result."""
    return "length" if reason == "length" else "stop"


_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
