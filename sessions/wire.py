"""Records as JSON-ready dicts, in the shapes that clients see and that events carry."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from engine.api import Timings, Usage
from sessions.records import ContextCut, Generation, Message, Session, Turn

Json = dict[str, Any]


def time_json(moment: datetime) -> str:
    """RFC 3339 in UTC, to the microsecond: 2026-01-31T12:00:00.000000Z."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def usage_json(usage: Usage | None) -> Json | None:
    if usage is None:
        return None
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def timings_json(timings: Timings | None) -> Json | None:
    """Milliseconds, and counts of tokens."""
    if timings is None:
        return None
    return {
        "queue_ms": timings.queue_ms,
        "prefill_ms": timings.prefill_ms,
        "decode_ms": timings.decode_ms,
        "ttft_ms": timings.ttft_ms,
        "total_ms": timings.total_ms,
        "drafted_tokens": timings.drafted_tokens,
        "accepted_tokens": timings.accepted_tokens,
    }


def cut_json(cut: ContextCut | None) -> Json | None:
    if cut is None:
        return None
    return {
        "first_kept": cut.first_kept,
        "dropped_messages": cut.dropped_messages,
        "dropped_tokens": cut.dropped_tokens,
    }


def session_json(session: Session) -> Json:
    return {
        "id": session.id,
        "title": session.title,
        "system_prompt": session.system_prompt,
        "params": dict(session.params),
        "context_policy": session.context_policy,
        "pinned": session.pinned,
        "archived": session.archived,
        "active_leaf": session.active_leaf,
        "created_at": time_json(session.created_at),
        "updated_at": time_json(session.updated_at),
    }


def message_json(message: Message) -> Json:
    return {
        "id": message.id,
        "session_id": message.session_id,
        "parent_id": message.parent_id,
        "role": message.role,
        "content": message.content,
        "status": message.status,
        "finish_reason": message.finish_reason,
        "usage": usage_json(message.usage),
        "timings": timings_json(message.timings),
        "created_at": time_json(message.created_at),
        "cut": cut_json(message.cut),
    }


def generation_json(generation: Generation) -> Json:
    return {
        "id": generation.id,
        "session_id": generation.session_id,
        "message_id": generation.message_id,
        "status": generation.status,
        "finish_reason": generation.finish_reason,
        "usage": usage_json(generation.usage),
        "timings": timings_json(generation.timings),
    }


def turn_json(turn: Turn) -> Json:
    return {
        "message": message_json(turn.message),
        "reply": message_json(turn.reply),
        "generation": generation_json(turn.generation),
    }
