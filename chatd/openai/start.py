"""From a request's body to a completion under way."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import replace

from chatd.openai.completion import Completion, Head, Opening
from chatd.openai.models import ServedModels
from chatd.openai.request import ChatCompletionRequest
from engine.api import Engine, GenerateRequest
from engine.text.api import ChatCodec, ChatMessage, Prompt


async def start_completion(asked: ChatCompletionRequest, engine: Engine, models: ServedModels) -> Completion:
    """Raises ModelNotFound, UnsupportedParameter, InvalidParameter, and the engine's and the codec's errors."""
    model, adapter = models.find(asked.model)
    asked.refuse_unsupported()
    params = asked.sampling(engine.info.default_params)
    continues, messages = asked.continues(), asked.chat()
    prompt = await asyncio.to_thread(
        engine.codec.prompt,
        messages,
        add_generation_prompt=not continues and asked.add_generation_prompt is not False,
        continue_final_message=continues,
        namespace=asked.namespace,
    )
    if asked.max_tokens is None and asked.max_completion_tokens is None and params.max_tokens is not None:
        # The default length is no wish of the client's: it gives way to a prompt that leaves less.
        left = engine.info.context_length - len(prompt.tokens)
        params = replace(params, max_tokens=max(1, min(params.max_tokens, left)))
    if params.grammar is not None:  # compiling it may take a moment; `submit` then finds it
        await asyncio.to_thread(engine.check, len(prompt.tokens), params)
    number = secrets.token_hex(12)
    request = GenerateRequest(
        f"chatcmpl-{number}", prompt.tokens, params, asked.namespace, n=asked.n or 1, adapter=adapter
    )
    head = Head(request.id, model, int(time.time()))
    opening = _opening(engine.codec, prompt, messages[-1]) if continues else Opening()
    return Completion(head, engine, request, engine.submit(request), opening)


def _opening(codec: ChatCodec, prompt: Prompt, message: ChatMessage) -> Opening | None:
    """None where the template altered the text, so that the ids in the prompt do not spell it."""
    ids = prompt.tokens[len(prompt.tokens) - prompt.opening_tokens :]
    return Opening(message.content, len(ids)) if codec.decode(ids) == message.content else None
