"""Statements about turns, each within the caller's transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from engine.text.api import Encoded
from sessions.content import title_of
from sessions.errors import IdempotencyConflict, NotFound, SessionBusy
from sessions.models import ACTIVE, GenerationRow, MessageRow, SessionRow
from sessions.records import Generation, Message, Session, Turn
from sessions.turn_end import ReplySoFar, TurnEnd
from sessions.turn_plan import TurnPlan, TurnRequest


async def find_repeated(db: AsyncSession, session_id: str, asked: TurnRequest) -> Turn | None:
    """The turn that this client_msg_id made before, if any. Raises IdempotencyConflict when its body was another."""
    if asked.client_msg_id is None:
        return None
    query = select(MessageRow).where(
        MessageRow.session_id == session_id, MessageRow.client_msg_id == asked.client_msg_id
    )
    message = await db.scalar(query)
    if message is None:
        return None
    if message.client_digest != asked.digest:
        raise IdempotencyConflict(asked.client_msg_id)
    found = select(GenerationRow, MessageRow).join(MessageRow, GenerationRow.message_id == MessageRow.id)
    first = found.where(MessageRow.parent_id == message.id).order_by(GenerationRow.created_at, GenerationRow.id)
    generation, reply = (await db.execute(first.limit(1))).one()
    return Turn(message.record(), reply.record(), generation.record())


async def active_generation(db: AsyncSession, session_id: str) -> str | None:
    query = select(GenerationRow.id).where(GenerationRow.session_id == session_id, GenerationRow.status.in_(ACTIVE))
    return await db.scalar(query)


async def insert_turn(db: AsyncSession, row: SessionRow, plan: TurnPlan, now: datetime) -> Session:
    """Writes the message, the reply's placeholder and the generation; gives the session as it then is.

    `row` is locked. Raises SessionBusy when another turn runs, or has come in since the plan was made.
    """
    if await active_generation(db, row.id) is not None:
        raise SessionBusy(row.id)
    if plan.asked.parent_id is None and row.active_leaf != plan.leaf:
        raise SessionBusy(row.id)
    turn = plan.turn
    await _insert_message(db, turn.message, plan)
    await _insert_message(db, turn.reply, plan)
    await db.execute(
        insert(GenerationRow).values(
            id=turn.generation.id,
            session_id=row.id,
            message_id=turn.reply.id,
            status=turn.generation.status,
            created_at=now,
        )
    )
    for message_id, encoded in plan.encoded.items():
        await _save_ids(db, message_id, encoded)
    changed: dict[str, Any] = {
        "title": title_of(turn.message.content) if row.title is None else row.title,
        "active_leaf": turn.reply.id,
        "updated_at": now,
        "version": row.version + 1,
    }
    if plan.system_encoded is not None:
        changed |= {"system_ids": plan.system_encoded.ids, "system_fingerprint": plan.system_encoded.fingerprint}
    for name, value in changed.items():
        setattr(row, name, value)
    await db.flush()
    return row.record()


async def _insert_message(db: AsyncSession, message: Message, plan: TurnPlan) -> None:
    asked = plan.asked if message.role == "user" else None
    await db.execute(
        insert(MessageRow).values(
            id=message.id,
            session_id=message.session_id,
            parent_id=message.parent_id,
            role=message.role,
            content=message.content,
            status=message.status,
            cut=asdict(message.cut) if message.cut else None,
            client_msg_id=asked.client_msg_id if asked else None,
            client_digest=asked.digest if asked and asked.client_msg_id else None,
            created_at=message.created_at,
        )
    )


async def _save_ids(db: AsyncSession, message_id: str, encoded: Encoded) -> None:
    values = {"ids": encoded.ids, "fingerprint": encoded.fingerprint}
    await db.execute(update(MessageRow).where(MessageRow.id == message_id).values(values))


async def save_replies(db: AsyncSession, replies: Sequence[ReplySoFar]) -> None:
    """Saves running replies; one whose turn has ended meanwhile, or was deleted, is left as it is."""
    for reply in replies:
        message = update(MessageRow).where(MessageRow.id == reply.turn.reply.id, MessageRow.status == "streaming")
        await db.execute(
            message.values(content=reply.content, ids=reply.encoded.ids, fingerprint=reply.encoded.fingerprint)
        )
        generation = update(GenerationRow).where(GenerationRow.id == reply.turn.generation.id)
        await db.execute(generation.where(GenerationRow.status == "queued").values(status="running"))


async def finish_turn(db: AsyncSession, end: TurnEnd) -> None:
    """Writes the end of a turn; nothing when its session was deleted."""
    session = select(SessionRow.id).where(SessionRow.id == end.turn.message.session_id).with_for_update()
    if await db.scalar(session) is None:
        return
    numbers = {
        "finish_reason": end.finish_reason,
        "usage": asdict(end.usage) if end.usage else None,
        "timings": asdict(end.timings) if end.timings else None,
    }
    message = update(MessageRow).where(MessageRow.id == end.turn.reply.id)
    await db.execute(
        message.values(
            content=end.content,
            status=end.message_status,
            ids=end.encoded.ids if end.encoded else None,
            fingerprint=end.encoded.fingerprint if end.encoded else None,
            **numbers,
        )
    )
    generation = update(GenerationRow).where(GenerationRow.id == end.turn.generation.id)
    await db.execute(generation.values(status=end.generation_status, error=end.error, **numbers))


async def generation_of(db: AsyncSession, owner: str, generation_id: str) -> tuple[Generation, Message]:
    """The owner's generation and the message that it writes. Raises NotFound."""
    query = (
        select(GenerationRow, MessageRow)
        .join(MessageRow, GenerationRow.message_id == MessageRow.id)
        .join(SessionRow, GenerationRow.session_id == SessionRow.id)
        .where(GenerationRow.id == generation_id, SessionRow.owner == owner)
    )
    found = (await db.execute(query)).one_or_none()
    if found is None:
        raise NotFound("generation")
    generation, message = found
    return generation.record(), message.record()


async def interrupt(db: AsyncSession, generation_id: str | None = None) -> int:
    """Marks what claims to run though nobody runs it as interrupted, text kept: one generation, or all of them.

    Gives the number of generations.
    """
    claims = select(GenerationRow.id, GenerationRow.message_id).where(GenerationRow.status.in_(ACTIVE))
    if generation_id is not None:
        claims = claims.where(GenerationRow.id == generation_id)
    found = (await db.execute(claims)).all()
    for claimed, message_id in found:
        message = update(MessageRow).where(MessageRow.id == message_id)
        await db.execute(message.values(status="interrupted"))
        await db.execute(update(GenerationRow).where(GenerationRow.id == claimed).values(status="interrupted"))
    return len(found)
