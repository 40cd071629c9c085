"""/api/v1/ws: the socket of the subprotocol chat.v1."""

from __future__ import annotations

from fastapi import APIRouter, WebSocket

from chatd.api.needs import NeedsBackend

router = APIRouter()


@router.websocket("/api/v1/ws")
async def chat_socket(socket: WebSocket, backend: NeedsBackend) -> None:
    await backend.hub.serve(socket)
