"""From a path of the message tree to the prompt's token ids, reusing every id that is still exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from engine.text.api import ChatCodec, ChatMessage, Encoded, Prompt
from sessions.records import Message

_ANSWERED = ("complete", "cancelled", "interrupted")


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message and the exact ids of its text, where there are any."""

    message: Message
    encoded: Encoded | None


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a turn is about: the system prompt, and the path that ends with the new user message.

    now: what a template that asks for the date is told; the same for all turns of a session, so that prefixes hold.
    """

    system: ChatMessage | None
    path: Sequence[StoredMessage]
    now: datetime

    def since(self, place: int) -> Conversation:
        """The same without the messages before `place`."""
        return replace(self, path=self.path[place:])


@dataclass(frozen=True, slots=True)
class Entry:
    """What the template sees as one message; `sources` are the ids of the stored messages whose text it joins.

    The system prompt has no source.
    """

    chat: ChatMessage
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Transcript:
    """A rendered conversation: entries[i] adds prompt.message_tokens[i] ids."""

    entries: tuple[Entry, ...]
    prompt: Prompt

    @property
    def tokens(self) -> int:
        return len(self.prompt.tokens)

    def fresh_ids(self) -> dict[str, Encoded]:
        """By message id: ids made now because none were stored, or under another fingerprint."""
        return {
            entry.sources[0]: segment
            for entry, segment in zip(self.entries, self.prompt.segments, strict=True)
            if len(entry.sources) == 1 and _outdated(entry.chat, segment)
        }

    def fresh_system_ids(self) -> Encoded | None:
        if not self.entries or self.entries[0].chat.role != "system":
            return None
        segment = self.prompt.segments[0]
        return segment if _outdated(self.entries[0].chat, segment) else None


def render(codec: ChatCodec, conversation: Conversation) -> Transcript:
    """Encodes a conversation. Raises what the codec raises (TemplateError).

    Failed and empty answers are left out; a user message that then follows another one is joined to it.
    """
    entries = [] if conversation.system is None else [Entry(conversation.system, ())]
    for stored in conversation.path:
        message = stored.message
        if message.role == "assistant":
            if message.status in _ANSWERED and message.content:
                entries.append(Entry(ChatMessage("assistant", message.content, stored.encoded), (message.id,)))
        elif entries and entries[-1].chat.role == "user":
            entries[-1] = _joined(entries[-1], message)
        else:
            entries.append(Entry(ChatMessage("user", message.content, stored.encoded), (message.id,)))
    prompt = codec.prompt([entry.chat for entry in entries], now=conversation.now)
    return Transcript(tuple(entries), prompt)


def _joined(earlier: Entry, message: Message) -> Entry:
    chat = replace(earlier.chat, content=f"{earlier.chat.content}\n\n{message.content}", encoded=None)
    return Entry(chat, (*earlier.sources, message.id))


def _outdated(chat: ChatMessage, segment: Encoded) -> bool:
    return chat.encoded is None or chat.encoded.fingerprint != segment.fingerprint
