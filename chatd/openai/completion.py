"""One chat completion under way: engine events in, OpenAI objects out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
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


class Completion:
    """Made when the engine has accepted the request. Use either `answer` or `stream`, once, and to its end."""

    def __init__(self, head: Head, engine: Engine, request: GenerateRequest, events: AsyncIterator[Event]) -> None:
        self._head = head
        self._engine = engine
        self._request = request
        self._events = events
        self._ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[SampledLogprob] = []

    def abort(self) -> None:
        """The client has gone: the engine stops within a step, and then the events end."""
        self._engine.abort(self._request.id)

    async def answer(self) -> dict[str, Any]:
        """The whole completion. Raises GenerationFailed."""
        async for event in self._events:
            if isinstance(event, Delta):
                self._take(event)
            elif isinstance(event, Finished):
                self._remember(event.reason)
                return self._whole(event)
            elif isinstance(event, Failed):
                raise GenerationFailed(event.code)
        raise GenerationFailed("no_end")

    async def stream(self, include_usage: bool) -> AsyncIterator[bytes]:
        """Role chunk, deltas, a chunk with finish_reason, the usage if asked for, [DONE]; or an error, and the end."""
        before, after = self._frame("chat.completion.chunk", include_usage)
        head = f'data: {before}"choices":[{{"index":0,"delta":'
        rest = f',"finish_reason":null}}]{after}}}\n\n'
        tail = f',"logprobs":null{rest}'
        yield f'{head}{{"role":"assistant","content":""}}{tail}'.encode()
        try:
            async for event in self._events:
                if isinstance(event, Delta):
                    self._take(event)
                    if event.logprobs:
                        told = json.dumps(logprobs_json(event.logprobs), ensure_ascii=False, separators=(",", ":"))
                        text = json.dumps(event.text, ensure_ascii=False)
                        yield f'{head}{{"content":{text}}},"logprobs":{told}{rest}'.encode()
                    elif event.text:
                        yield f'{head}{{"content":{json.dumps(event.text, ensure_ascii=False)}}}{tail}'.encode()
                elif isinstance(event, Finished):
                    self._remember(event.reason)
                    reason = json.dumps(_reason(event.reason))
                    yield f'{head}{{}},"logprobs":null,"finish_reason":{reason}}}]{after}}}\n\n'.encode()
                    if include_usage:
                        usage = json.dumps(usage_json(event.usage), separators=(",", ":"))
                        yield f'data: {before}"choices":[],"usage":{usage}}}\n\n'.encode()
                    yield DONE
                elif isinstance(event, Failed):
                    raise GenerationFailed(event.code)
        except GenerationFailed as error:
            yield f"data: {json.dumps(problem_of(error).openai_json())}\n\n".encode()

    def _take(self, delta: Delta) -> None:
        self._ids.extend(delta.ids)
        self._text.append(delta.text)
        self._logprobs.extend(delta.logprobs)

    def _remember(self, reason: FinishReason) -> None:
        if reason != "cancelled" and self._ids:
            asked = self._request
            self._engine.codec.remember(asked.namespace, asked.tokens, self._ids, "".join(self._text))

    def _frame(self, kind: str, include_usage: bool) -> tuple[str, str]:
        """What stands before `"choices"` and after it in every chunk."""
        head = {"id": self._head.id, "object": kind, "created": self._head.created, "model": self._head.model}
        opened = json.dumps(head, separators=(",", ":")).removesuffix("}") + ","
        return opened, ',"usage":null' if include_usage else ""

    def _whole(self, end: Finished) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(self._text), "refusal": None}
        told = None if self._request.params.logprobs is None else logprobs_json(self._logprobs)
        choice = {"index": 0, "message": message, "logprobs": told, "finish_reason": _reason(end.reason)}
        return {
            "id": self._head.id,
            "object": "chat.completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": [choice],
            "usage": usage_json(end.usage),
        }


def _reason(reason: FinishReason) -> str:
    """Nobody but the client cancels a completion, and it does not see the result."""
    return "length" if reason == "length" else "stop"
