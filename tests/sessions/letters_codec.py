"""A codec of bytes with a ChatML-like template: small enough to be obviously right."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import numpy as np
import numpy.typing as npt

from engine.text.api import ChatMessage, Encoded, Prompt

START, END, SILENT = 1, 2, 3
"""Control ids: the start of a message, its end (also the eos), and one that has no text at all."""
FIRST_BYTE = 8
MIXED = 300
"""One token for a space and the first byte of a two-byte character."""


def token(byte: int) -> int:
    return FIRST_BYTE + byte


def token_bytes(id: int) -> bytes:
    if id == MIXED:
        return b" \xc3"
    return bytes([id - FIRST_BYTE]) if FIRST_BYTE <= id < FIRST_BYTE + 256 else b""


class LettersCodec:
    """ids = UTF-8 bytes + 8. default_system stands for a template that brings its own system prompt."""

    def __init__(self, fingerprint: str = "letters-1", default_system: str | None = None) -> None:
        self._fingerprint = fingerprint
        self._default_system = default_system
        self.encoded: list[str] = []
        self.dates: list[datetime] = []

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def encode(self, text: str, *, continued: bool = False) -> npt.NDArray[np.int32]:
        self.encoded.append(text)
        return np.asarray([token(byte) for byte in text.encode()], dtype=np.int32)

    def decode(self, ids: Sequence[int] | npt.NDArray[np.int32]) -> str:
        return b"".join(token_bytes(int(id)) for id in ids).decode(errors="replace")

    def remember(
        self,
        namespace: str,
        prompt_tokens: npt.NDArray[np.int32],
        ids: Sequence[int] | npt.NDArray[np.int32],
        text: str,
    ) -> None:
        raise AssertionError("sessions keep their ids themselves")

    def prompt(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        namespace: str | None = None,
        now: datetime | None = None,
    ) -> Prompt:
        assert namespace is None
        assert now is not None
        assert now.tzinfo is not None
        self.dates.append(now)
        tokens: list[int] = []
        segments: list[Encoded] = []
        counts: list[int] = []
        if self._default_system is not None and (not messages or messages[0].role != "system"):
            tokens += self._framed("system", self._default_system)
        for place, message in enumerate(messages):
            assert place == 0 or message.role != "system"
            before = len(tokens) if place else 0
            exact = message.encoded if message.encoded and message.encoded.fingerprint == self.fingerprint else None
            if message.role == "assistant":
                ids = [int(id) for id in exact.ids] if exact else [*self.encode(message.content), END]
                tokens += [START, *self._bytes("assistant\n")]
                if continue_final_message and place == len(messages) - 1:
                    opening = ids[:-1] if ids[-1:] == [END] else ids
                    tokens += opening
                    segments.append(Encoded(np.asarray(ids, dtype=np.int32), self.fingerprint))
                    counts.append(len(tokens) - before)
                    return Prompt(np.asarray(tokens, np.int32), tuple(segments), tuple(counts), 0, len(opening))
                tokens += ids
                tokens += [] if ids and ids[-1] == END else [END]
                tokens += self._bytes("\n")
            else:
                ids = [int(id) for id in exact.ids] if exact else self._framed(message.role, message.content)
                tokens += ids
            segments.append(Encoded(np.asarray(ids, dtype=np.int32), self.fingerprint))
            counts.append(len(tokens) - before)
        header = [START, *self._bytes("assistant\n")] if add_generation_prompt else []
        return Prompt(np.asarray(tokens + header, dtype=np.int32), tuple(segments), tuple(counts), len(header))

    def _framed(self, role: str, content: str) -> list[int]:
        return [START, *self._bytes(f"{role}\n"), *self.encode(content), END, *self._bytes("\n")]

    def _bytes(self, text: str) -> list[int]:
        return [token(byte) for byte in text.encode()]
