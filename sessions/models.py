"""The tables. Messages form a tree by parent_id alone; a message keeps its text and its exact token ids."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import (
    JSON,
    Boolean,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from engine.api import Timings, Usage
from engine.text.api import Encoded
from sessions.records import ContextCut, Generation, GenerationStatus, Message, MessageRole, MessageStatus, Session

ACTIVE = ("queued", "running")
_NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class UtcDateTime(TypeDecorator[datetime]):
    """Aware times in UTC; SQLite, which knows no zones, holds the same moment without one."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        moment = value.astimezone(UTC)
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class TokenIdBlob(TypeDecorator[npt.NDArray[np.int32]]):
    """A one-dimensional int32 array as little-endian bytes."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: npt.NDArray[np.int32] | None, dialect: Dialect) -> bytes | None:
        return None if value is None else np.asarray(value, dtype="<i4").tobytes()

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> npt.NDArray[np.int32] | None:
        return None if value is None else np.frombuffer(value, dtype="<i4").astype(np.int32)


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=_NAMES)
    type_annotation_map = {  # noqa: RUF012 - read by SQLAlchemy as it is
        str: Text,
        datetime: UtcDateTime,
        bool: Boolean,
        int: Integer,
        dict[str, Any]: JSON(none_as_null=True),
        npt.NDArray[np.int32]: TokenIdBlob,
    }


class SessionRow(Base):
    __tablename__ = "sessions"
    __table_args__ = (Index(None, "owner", "updated_at", "id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    title: Mapped[str | None]
    system_prompt: Mapped[str | None]
    system_ids: Mapped[npt.NDArray[np.int32] | None] = mapped_column(TokenIdBlob)
    system_fingerprint: Mapped[str | None]
    params: Mapped[dict[str, Any]]
    context_policy: Mapped[str]
    active_leaf: Mapped[str | None]
    pinned: Mapped[bool]
    archived: Mapped[bool]
    version: Mapped[int]
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]

    def record(self) -> Session:
        return Session(
            id=self.id,
            owner=self.owner,
            title=self.title,
            system_prompt=self.system_prompt,
            params=self.params,
            context_policy=self.context_policy,
            active_leaf=self.active_leaf,
            created_at=self.created_at,
            updated_at=self.updated_at,
            pinned=self.pinned,
            archived=self.archived,
            version=self.version,
        )

    @property
    def system_encoded(self) -> Encoded | None:
        return encoded_of(self.system_ids, self.system_fingerprint)


class MessageRow(Base):
    __tablename__ = "messages"
    __table_args__ = (UniqueConstraint("session_id", "client_msg_id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"))
    parent_id: Mapped[str | None] = mapped_column(ForeignKey("messages.id"), index=True)
    role: Mapped[MessageRole] = mapped_column(Text)
    content: Mapped[str]
    status: Mapped[MessageStatus] = mapped_column(Text)
    finish_reason: Mapped[str | None]
    usage: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    timings: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    cut: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    ids: Mapped[npt.NDArray[np.int32] | None] = mapped_column(TokenIdBlob)
    fingerprint: Mapped[str | None]
    client_msg_id: Mapped[str | None]
    client_digest: Mapped[str | None]
    created_at: Mapped[datetime]

    def record(self) -> Message:
        return Message(
            id=self.id,
            session_id=self.session_id,
            parent_id=self.parent_id,
            role=self.role,
            content=self.content,
            status=self.status,
            finish_reason=self.finish_reason,
            usage=Usage(**self.usage) if self.usage else None,
            timings=Timings(**self.timings) if self.timings else None,
            created_at=self.created_at,
            cut=ContextCut(**self.cut) if self.cut else None,
        )

    @property
    def encoded(self) -> Encoded | None:
        return encoded_of(self.ids, self.fingerprint)


class GenerationRow(Base):
    __tablename__ = "generations"
    __table_args__ = (
        Index(
            "uq_generations_active_session",
            "session_id",
            unique=True,
            sqlite_where=text("status IN ('queued', 'running')"),
            postgresql_where=text("status IN ('queued', 'running')"),
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"), index=True)
    message_id: Mapped[str] = mapped_column(ForeignKey("messages.id", ondelete="CASCADE"), index=True)
    status: Mapped[GenerationStatus] = mapped_column(Text)
    finish_reason: Mapped[str | None]
    usage: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    timings: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    error: Mapped[str | None]
    created_at: Mapped[datetime]

    def record(self) -> Generation:
        return Generation(
            id=self.id,
            session_id=self.session_id,
            message_id=self.message_id,
            status=self.status,
            finish_reason=self.finish_reason,
            usage=Usage(**self.usage) if self.usage else None,
            timings=Timings(**self.timings) if self.timings else None,
            error=self.error,
        )


def encoded_of(ids: npt.NDArray[np.int32] | None, fingerprint: str | None) -> Encoded | None:
    return None if ids is None or fingerprint is None else Encoded(ids, fingerprint)
