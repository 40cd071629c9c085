"""From a request's body to a completion under way."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import replace

from chatd.errors import ModelNotFound
from chatd.openai.completion import Completion, Head
from chatd.openai.request import ChatCompletionRequest
from engine.api import Engine, GenerateRequest


async def start_completion(asked: ChatCompletionRequest, engine: Engine, served: str) -> Completion:
    """Raises ModelNotFound, UnsupportedParameter, InvalidParameter, and the engine's and the codec's errors."""
    if asked.model not in (served, "default"):
        raise ModelNotFound(served)
    asked.refuse_unsupported()
    params = asked.sampling(engine.info.default_params)
    prompt = await asyncio.to_thread(engine.codec.prompt, asked.chat(), namespace=asked.namespace)
    if asked.max_tokens is None and asked.max_completion_tokens is None and params.max_tokens is not None:
        # The default length is no wish of the client's: it gives way to a prompt that leaves less.
        left = engine.info.context_length - len(prompt.tokens)
        params = replace(params, max_tokens=max(1, min(params.max_tokens, left)))
    if params.grammar is not None:  # compiling it may take a moment; `submit` then finds it
        await asyncio.to_thread(engine.check, len(prompt.tokens), params)
    number = secrets.token_hex(12)
    request = GenerateRequest(f"chatcmpl-{number}", prompt.tokens, params, asked.namespace)
    head = Head(request.id, served, int(time.time()))
    return Completion(head, engine, request, engine.submit(request))
