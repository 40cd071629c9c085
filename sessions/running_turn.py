"""What a running turn has produced so far, as plain state that a test can drive by hand."""

from __future__ import annotations

import asyncio
from typing import Literal

from engine.api import Delta, Failed, Finished
from engine.text.api import ChatCodec, Encoded
from sessions.records import GenerationStatus, MessageStatus, Turn
from sessions.reply_ids import reply_ids, shown
from sessions.turn_end import ReplySoFar, TurnEnd

Outcome = Finished | Failed | Literal["interrupted"]
"""How a turn ended: as the engine says, or because this process stops before the engine could say anything."""

_ENDED: dict[str, tuple[MessageStatus, GenerationStatus]] = {
    "stop": ("complete", "completed"),
    "length": ("complete", "completed"),
    "cancelled": ("cancelled", "cancelled"),
}


class RunningTurn:
    """Collects text and ids, and carries what others decide about the turn.

    interrupted: the server, not the user, aborts it. deleted: its session is gone, nothing more is saved or sent.
    ending: the engine is done with it. ended: everything is.
    """

    def __init__(self, turn: Turn, codec: ChatCodec) -> None:
        self.turn = turn
        self.status: GenerationStatus = "queued"
        self.interrupted = False
        self.deleted = False
        self.ending = False
        self.ended = asyncio.Event()
        self.length = 0
        self._codec = codec
        self._text: list[str] = []
        self._ids: list[int] = []
        self._heard = 0
        self._saved = 0

    @property
    def text(self) -> str:
        self._text = ["".join(self._text)]
        return self._text[0]

    @property
    def unsaved(self) -> int:
        """Code points that no save has covered yet."""
        return self.length - self._saved

    def take(self, delta: Delta) -> str:
        """Adds a delta and gives its text as it is to be shown; `length` is in code points.

        Text that no id spells (a stop string began inside a token) is encoded, so that ids and text stay companions;
        without any ids before it there are none at all, and the next prompt encodes the text.
        """
        self._ids.extend(delta.ids)
        text = shown(delta.text)
        if delta.unspelled and self._ids:
            rest = self._codec.encode(text[-delta.unspelled :], continued=True)
            self._ids.extend(int(token) for token in rest)
        if text:
            self._heard = len(self._ids)
            self._text.append(text)
            self.length += len(text)
        return text

    def so_far(self) -> ReplySoFar:
        ids = reply_ids(self._codec, self._ids, self._heard, self.text, stopped=False, ended=False)
        return ReplySoFar(self.turn, self.text, Encoded(ids, self._codec.fingerprint))

    def saved(self, reply: ReplySoFar) -> None:
        self._saved = max(self._saved, len(reply.content))

    def end(self, outcome: Outcome) -> TurnEnd:
        """What to write for this outcome. A turn that the server stopped is `interrupted`, whatever the engine says."""
        if isinstance(outcome, Failed) and outcome.code != "shutdown":
            return TurnEnd(
                turn=self.turn,
                content=self.text,
                encoded=None,
                message_status="failed",
                generation_status="failed",
                finish_reason=None,
                usage=None,
                timings=None,
                failure=outcome,
            )
        finished = outcome if isinstance(outcome, Finished) else None
        reason = finished.reason if finished else "cancelled"
        message_status, generation_status = _ENDED[reason]
        if reason == "cancelled" and (finished is None or self.interrupted):
            message_status, generation_status = "interrupted", "interrupted"
        ids = reply_ids(
            self._codec,
            self._ids,
            self._heard,
            self.text,
            stopped=reason == "stop",
            ended=reason != "cancelled",
        )
        return TurnEnd(
            turn=self.turn,
            content=self.text,
            encoded=Encoded(ids, self._codec.fingerprint),
            message_status=message_status,
            generation_status=generation_status,
            finish_reason=None if message_status == "interrupted" else reason,
            usage=finished.usage if finished else None,
            timings=finished.timings if finished else None,
            failure=None,
        )
