"""Sessions, the message tree with its token ids, and generations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision: str | None = None

ACTIVE = sa.text("status IN ('queued', 'running')")


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("title", sa.Text()),
        sa.Column("system_prompt", sa.Text()),
        sa.Column("system_ids", sa.LargeBinary()),
        sa.Column("system_fingerprint", sa.Text()),
        sa.Column("params", sa.JSON(), nullable=False),
        sa.Column("context_policy", sa.Text(), nullable=False),
        sa.Column("active_leaf", sa.Text()),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("archived", sa.Boolean(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_sessions"),
    )
    op.create_index("ix_sessions_owner_updated_at_id", "sessions", ["owner", "updated_at", "id"])
    op.create_table(
        "messages",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("parent_id", sa.Text()),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("finish_reason", sa.Text()),
        sa.Column("usage", sa.JSON()),
        sa.Column("timings", sa.JSON()),
        sa.Column("cut", sa.JSON()),
        sa.Column("ids", sa.LargeBinary()),
        sa.Column("fingerprint", sa.Text()),
        sa.Column("client_msg_id", sa.Text()),
        sa.Column("client_digest", sa.Text()),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_messages"),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name="fk_messages_session_id_sessions", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["parent_id"], ["messages.id"], name="fk_messages_parent_id_messages"),
        sa.UniqueConstraint("session_id", "client_msg_id", name="uq_messages_session_id_client_msg_id"),
    )
    op.create_index("ix_messages_parent_id", "messages", ["parent_id"])
    op.create_table(
        "generations",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("message_id", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("finish_reason", sa.Text()),
        sa.Column("usage", sa.JSON()),
        sa.Column("timings", sa.JSON()),
        sa.Column("error", sa.Text()),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_generations"),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name="fk_generations_session_id_sessions", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["message_id"], ["messages.id"], name="fk_generations_message_id_messages", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_generations_session_id", "generations", ["session_id"])
    op.create_index("ix_generations_message_id", "generations", ["message_id"])
    op.create_index(
        "uq_generations_active_session",
        "generations",
        ["session_id"],
        unique=True,
        sqlite_where=ACTIVE,
        postgresql_where=ACTIVE,
    )


def downgrade() -> None:
    op.drop_table("generations")
    op.drop_table("messages")
    op.drop_table("sessions")
