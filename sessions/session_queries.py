"""Statements about sessions and the message tree, each within the caller's transaction."""

from __future__ import annotations

from sqlalchemy import delete, insert, literal, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from sessions.cursor import Cursor
from sessions.errors import NotFound
from sessions.models import MessageRow, SessionRow
from sessions.records import Message, Page, Session
from sessions.transcript import StoredMessage


async def add_session(db: AsyncSession, session: Session) -> None:
    await db.execute(
        insert(SessionRow).values(
            id=session.id,
            owner=session.owner,
            title=session.title,
            system_prompt=session.system_prompt,
            params=dict(session.params),
            context_policy=session.context_policy,
            active_leaf=session.active_leaf,
            pinned=session.pinned,
            archived=session.archived,
            version=session.version,
            created_at=session.created_at,
            updated_at=session.updated_at,
        )
    )


async def session_row(db: AsyncSession, owner: str, session_id: str, *, lock: bool = False) -> SessionRow:
    """The row of the owner's session; `lock` keeps other writers of this session waiting. Raises NotFound."""
    query = select(SessionRow).where(SessionRow.id == session_id, SessionRow.owner == owner)
    row = await db.scalar(query.with_for_update() if lock else query)
    if row is None:
        raise NotFound("session")
    return row


async def session_page(db: AsyncSession, owner: str, limit: int, after: Cursor | None) -> Page[Session]:
    """The owner's sessions, the last updated first."""
    query = select(SessionRow).where(SessionRow.owner == owner)
    if after is not None:
        same = (SessionRow.updated_at == after.updated_at) & (SessionRow.id < after.id)
        query = query.where(or_(SessionRow.updated_at < after.updated_at, same))
    query = query.order_by(SessionRow.updated_at.desc(), SessionRow.id.desc()).limit(limit + 1)
    rows = (await db.scalars(query)).all()
    shown = tuple(row.record() for row in rows[:limit])
    more = len(rows) > limit
    return Page(shown, Cursor(shown[-1].updated_at, shown[-1].id).encode() if more else None)


async def remove_session(db: AsyncSession, owner: str, session_id: str) -> None:
    """Deletes the session with its messages and generations. Raises NotFound."""
    row = await session_row(db, owner, session_id, lock=True)
    await db.execute(delete(SessionRow).where(SessionRow.id == row.id))


async def message_tree(db: AsyncSession, session_id: str) -> list[Message]:
    """All messages of a session, oldest first: parents come before their children."""
    rows = await db.scalars(select(MessageRow).where(MessageRow.session_id == session_id))
    return sorted((row.record() for row in rows), key=lambda message: message.id)


async def message_path(db: AsyncSession, session_id: str, leaf: str | None) -> list[StoredMessage]:
    """From the root down to `leaf`, with ids; empty when leaf is None or not a message of this session."""
    if leaf is None:
        return []
    path = (
        select(MessageRow.id, MessageRow.parent_id, literal(0).label("height"))
        .where(MessageRow.id == leaf, MessageRow.session_id == session_id)
        .cte("path", recursive=True)
    )
    parent = aliased(MessageRow)
    path = path.union_all(
        select(parent.id, parent.parent_id, path.c.height + 1).join(path, parent.id == path.c.parent_id)
    )
    query = select(MessageRow).join(path, MessageRow.id == path.c.id).order_by(path.c.height.desc())
    return [StoredMessage(row.record(), row.encoded) for row in await db.scalars(query)]
