"""/api/v1/generations: answers under way, and their event logs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chatd.api.event_log import event_stream
from chatd.api.needs import PROBLEMS, GenerationId, NeedsBackend
from chatd.owner import OWNER
from chatd.schemas import GenerationOut, ReadEvents
from chatd.sse import EventStream
from sessions import InvalidInput, generation_json

router = APIRouter(prefix="/api/v1/generations", tags=["generations"], responses=PROBLEMS)


@router.get("/{generation_id}", responses={200: {"model": GenerationOut}})
async def get_generation(generation_id: GenerationId, backend: NeedsBackend) -> Response:
    return JSONResponse(generation_json(await backend.turns.generation(OWNER, generation_id)))


@router.get("/{generation_id}/events", responses={200: {"content": {"text/event-stream": {}}}})
async def read_events(
    generation_id: GenerationId, query: Annotated[ReadEvents, Query()], request: Request, backend: NeedsBackend
) -> Response:
    """The events numbered above `after` (or Last-Event-ID), ending after the terminal one; 410 when they are gone."""
    after = query.after
    if after is None:
        after = _last_event_id(request.headers.get("last-event-id"))
    return EventStream(event_stream(await backend.turns.events(OWNER, generation_id, after)))


@router.post("/{generation_id}/cancel", responses={200: {"model": GenerationOut}})
async def cancel_generation(generation_id: GenerationId, backend: NeedsBackend) -> Response:
    """Keeps the text written so far; a generation that has ended stays as it is."""
    return JSONResponse(generation_json(await backend.turns.cancel(OWNER, generation_id)))


def _last_event_id(header: str | None) -> int:
    if not header:
        return 0
    if not (header.isascii() and header.isdigit() and len(header) < 16):
        raise InvalidInput("Last-Event-ID", "must be the number of an event")
    return int(header)
