"""/api/v1/sessions: conversations and their messages."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chatd.api.event_log import event_stream
from chatd.api.needs import PROBLEMS, NeedsBackend, SessionId
from chatd.owner import OWNER
from chatd.schemas import (
    CreateMessage,
    CreateSession,
    ListMessages,
    ListSessions,
    MessageList,
    SessionOut,
    SessionPage,
    TurnOut,
)
from chatd.sse import EventStream
from sessions import Session, message_json, session_json, turn_json

router = APIRouter(prefix="/api/v1/sessions", tags=["sessions"], responses=PROBLEMS)


@router.post("", status_code=201, responses={201: {"model": SessionOut}})
async def create_session(body: CreateSession, backend: NeedsBackend) -> Response:
    session = await backend.sessions.create(
        OWNER,
        title=body.title,
        system_prompt=body.system_prompt,
        params=None if body.params is None else body.params.given(),
        context_policy=body.context_policy,
    )
    headers = {"Location": f"/api/v1/sessions/{session.id}", "ETag": _etag(session)}
    return JSONResponse(session_json(session), 201, headers)


@router.get("", responses={200: {"model": SessionPage}})
async def list_sessions(query: Annotated[ListSessions, Query()], backend: NeedsBackend) -> Response:
    """The last updated first."""
    page = await backend.sessions.list(OWNER, limit=query.limit, after=query.after)
    data = [session_json(session) for session in page.data]
    return JSONResponse({"data": data, "has_more": page.next is not None, "next": page.next})


@router.get("/{session_id}", responses={200: {"model": SessionOut}, 304: {"description": "unchanged"}})
async def get_session(session_id: SessionId, request: Request, backend: NeedsBackend) -> Response:
    session = await backend.sessions.get(OWNER, session_id)
    headers = {"ETag": _etag(session), "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return JSONResponse(session_json(session), headers=headers)


@router.delete("/{session_id}", status_code=204)
async def delete_session(session_id: SessionId, backend: NeedsBackend) -> Response:
    """Stops a running turn first."""
    await backend.sessions.delete(OWNER, session_id)
    return Response(status_code=204)


@router.get("/{session_id}/messages", responses={200: {"model": MessageList}})
async def list_messages(
    session_id: SessionId, query: Annotated[ListMessages, Query()], backend: NeedsBackend
) -> Response:
    """The active branch from its root to its leaf, or with tree=true all branches."""
    messages = await backend.sessions.messages(OWNER, session_id, tree=query.tree)
    return JSONResponse({"data": [message_json(message) for message in messages]})


@router.post("/{session_id}/messages", status_code=202, responses={202: {"model": TurnOut}})
async def create_message(
    session_id: SessionId,
    body: CreateMessage,
    request: Request,
    backend: NeedsBackend,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None,
) -> Response:
    """Starts a turn. With `Accept: text/event-stream` its events are the answer, after `message.created`."""
    turn = await backend.turns.start(
        OWNER,
        session_id,
        content=body.content,
        parent_id=body.parent_id,
        client_msg_id=body.client_msg_id or idempotency_key,
        params=None if body.params is None else body.params.given(),
    )
    generation_id = turn.generation.id
    if "text/event-stream" in request.headers.get("accept", ""):
        events = await backend.turns.events(OWNER, generation_id)
        return EventStream(event_stream(events, first=("message.created", turn_json(turn))))
    return JSONResponse(turn_json(turn), 202, {"Location": f"/api/v1/generations/{generation_id}"})


def _etag(session: Session) -> str:
    return f'"{session.version}"'
