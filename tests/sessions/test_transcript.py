"""Which stored messages become which messages of the prompt, and which ids are stored anew."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest

from engine.text.api import ChatMessage, Encoded
from sessions import Message
from sessions.records import MessageStatus
from sessions.transcript import Conversation, StoredMessage, Transcript, render
from tests.sessions.letters_codec import END, LettersCodec, token

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def talk(codec: LettersCodec, system: ChatMessage | None, path: list[StoredMessage]) -> Transcript:
    return render(codec, Conversation(system, path, NOW))


def stored(id: str, content: str, status: MessageStatus = "complete", encoded: Encoded | None = None) -> StoredMessage:
    """`id` starts with u for the user's, with a for the assistant's."""
    return StoredMessage(
        Message(
            id=id,
            session_id="s",
            parent_id=None,
            role="assistant" if id.startswith("a") else "user",
            content=content,
            status=status,
            finish_reason=None,
            usage=None,
            timings=None,
            created_at=NOW,
        ),
        encoded,
    )


def entries(transcript: Transcript) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(entry.chat.role, entry.chat.content, entry.sources) for entry in transcript.entries]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ([("u1", "x", "complete")], [("user", "x", ("u1",))]),
        (
            [("u1", "x", "complete"), ("a1", "y", "complete"), ("u2", "z", "complete")],
            [("user", "x", ("u1",)), ("assistant", "y", ("a1",)), ("user", "z", ("u2",))],
        ),
        (
            [("u1", "x", "complete"), ("a1", "y", "cancelled"), ("u2", "z", "complete")],
            [("user", "x", ("u1",)), ("assistant", "y", ("a1",)), ("user", "z", ("u2",))],
        ),
        (
            [("u1", "x", "complete"), ("a1", "y", "interrupted"), ("u2", "z", "complete")],
            [("user", "x", ("u1",)), ("assistant", "y", ("a1",)), ("user", "z", ("u2",))],
        ),
        (
            [("u1", "x", "complete"), ("a1", "y", "failed"), ("u2", "z", "complete")],
            [("user", "x\n\nz", ("u1", "u2"))],
        ),
        (
            [("u1", "x", "complete"), ("a1", "", "cancelled"), ("u2", "z", "complete")],
            [("user", "x\n\nz", ("u1", "u2"))],
        ),
        (
            [
                ("u1", "x", "complete"),
                ("a1", "", "complete"),
                ("u2", "y", "complete"),
                ("a2", "", "interrupted"),
                ("u3", "z", "complete"),
            ],
            [("user", "x\n\ny\n\nz", ("u1", "u2", "u3"))],
        ),
    ],
)
def test_what_the_model_sees(
    path: list[tuple[str, str, MessageStatus]], expected: list[tuple[str, str, tuple[str, ...]]]
) -> None:
    assert entries(talk(LettersCodec(), None, [stored(*message) for message in path])) == expected


def test_joined_text_is_encoded_anew_and_its_ids_are_nobodys() -> None:
    codec = LettersCodec()
    first = talk(codec, None, [stored("u1", "x")]).fresh_ids()["u1"]
    transcript = talk(codec, None, [stored("u1", "x", encoded=first), stored("a1", "", "failed"), stored("u2", "z")])
    assert codec.encoded == ["x", "x\n\nz"]
    assert transcript.fresh_ids() == {}


def test_exact_ids_are_reused_and_only_the_others_are_fresh() -> None:
    codec = LettersCodec()
    user = talk(codec, None, [stored("u1", "x")]).fresh_ids()["u1"]
    reply = Encoded(np.asarray([token(ord("y")), END], dtype=np.int32), codec.fingerprint)
    old = Encoded(user.ids, "another")
    codec.encoded.clear()
    path = [stored("u1", "x", encoded=user), stored("a1", "y", encoded=reply), stored("u2", "x", encoded=old)]
    transcript = talk(codec, ChatMessage("system", "S"), [*path, stored("a2", "y"), stored("u3", "z")])
    assert codec.encoded == ["S", "x", "y", "z"]
    fresh = transcript.fresh_ids()
    assert sorted(fresh) == ["a2", "u2", "u3"]
    assert fresh["a2"].ids.tolist() == reply.ids.tolist()
    system = transcript.fresh_system_ids()
    assert system is not None
    again = talk(codec, ChatMessage("system", "S", system), path)
    assert again.fresh_system_ids() is None
