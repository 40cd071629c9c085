"""/v1: the part of OpenAI's interface that is built."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chatd.api.needs import NeedsBackend
from chatd.openai.completion import Completion
from chatd.openai.models import ServedModels
from chatd.openai.request import ChatCompletionRequest
from chatd.openai.start import start_completion
from chatd.sse import EventStream

router = APIRouter(prefix="/v1", tags=["openai"])

_CLIENT_GONE = 499


@router.get("/models")
async def list_models(backend: NeedsBackend) -> Response:
    """The model, and each of its adapters as a model of its own."""
    models = ServedModels.of(backend.settings)
    return JSONResponse({"object": "list", "data": models.listed(backend.started)})


@router.get("/models/{name:path}")
async def show_model(name: str, backend: NeedsBackend) -> Response:
    return JSONResponse(ServedModels.of(backend.settings).shown(name, backend.started))


@router.post("/chat/completions")
async def create_chat_completion(asked: ChatCompletionRequest, request: Request, backend: NeedsBackend) -> Response:
    completion = await start_completion(asked, backend.engine, ServedModels.of(backend.settings))
    if asked.stream:
        return EventStream(completion.stream(asked.include_usage), on_disconnect=completion.abort)
    return await _whole(completion, request)


async def _whole(completion: Completion, request: Request) -> Response:
    """The answer as one object; a client that goes away stops the engine."""
    answering = asyncio.create_task(completion.answer())
    watching = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            completion.abort()
            await asyncio.wait((answering,))
            return Response(status_code=_CLIENT_GONE)
        return JSONResponse(answering.result())
    finally:
        watching.cancel()
        answering.cancel()
        await asyncio.gather(answering, watching, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
