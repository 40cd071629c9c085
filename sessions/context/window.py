"""The policy `window`: whole turns go, oldest first, down to half of the budget in one step.

    before   S | u1 a1 | u2 a2 | u3 a3 | u4 a4 | u5      over the budget
    after    S                         | u4 a4 | u5      half of it; the same cut then serves turns 6, 7, ...

The big step keeps the new prefix stable, and so cached, for many turns. The system prompt S and the last
user message stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.api import ChatCodec
from sessions.context.budget import Budget
from sessions.context.fitted import Fitted
from sessions.errors import ContextOverflow
from sessions.records import ContextCut
from sessions.transcript import Conversation, StoredMessage, Transcript, render


def fit_window(codec: ChatCodec, conversation: Conversation, budget: Budget) -> Fitted:
    """Reuses the cut inherited down the path while it fits, else takes a new one. Raises ContextOverflow."""
    path = conversation.path
    inherited = _inherited(path)
    start = _place(path, inherited.first_kept) if inherited else 0
    before = render(codec, conversation.since(start))
    if before.tokens <= budget.tokens:
        return Fitted(before, None)
    transcript, first = before, start
    for first in _candidates(path, start, before, budget.tokens // 2):
        transcript = render(codec, conversation.since(first))
        if transcript.tokens <= budget.tokens // 2:
            break
    if transcript.tokens > budget.tokens:
        raise ContextOverflow(transcript.tokens, budget.reserve, budget.limit)
    earlier = inherited.dropped_tokens if inherited else 0
    dropped_tokens = earlier + before.tokens - transcript.tokens
    return Fitted(transcript, ContextCut(path[first].message.id, first, dropped_tokens))


def _inherited(path: Sequence[StoredMessage]) -> ContextCut | None:
    return next((stored.message.cut for stored in reversed(path) if stored.message.cut), None)


def _place(path: Sequence[StoredMessage], message_id: str) -> int:
    return next(place for place, stored in enumerate(path) if stored.message.id == message_id)


def _candidates(path: Sequence[StoredMessage], start: int, before: Transcript, target: int) -> list[int]:
    """Places of user messages where a cut should leave at most `target` tokens, then the last user message."""
    left = before.tokens
    after: dict[str, int] = {}
    for entry, tokens in zip(before.entries, before.prompt.message_tokens, strict=True):
        for source in entry.sources:
            after[source] = left
        if entry.sources:
            left -= tokens
    places = [i for i in range(start + 1, len(path)) if path[i].message.role == "user"]
    return [i for i in places if after[path[i].message.id] <= target or i == places[-1]]
