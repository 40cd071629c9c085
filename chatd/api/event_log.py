"""A generation's event log as server-sent events: event = type, id = seq, data = JSON."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from sessions import LoggedEvent


async def event_stream(
    events: AsyncIterator[LoggedEvent], first: tuple[str, dict[str, Any]] | None = None
) -> AsyncIterator[bytes]:
    """first: an event before the log's own; it has no number."""
    if first is not None:
        yield f"event: {first[0]}\ndata: {_dumps(first[1])}\n\n".encode()
    async for event in events:
        yield f"event: {event.type}\nid: {event.seq}\ndata: {_dumps(event.data)}\n\n".encode()


def _dumps(data: dict[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))
