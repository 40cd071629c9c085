"""The seam between text and token ids, as sessions/ and chatd/ see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids (int32, 1-D) and the fingerprint under which they are exact: whoever stores ids stores both."""

    ids: npt.NDArray[np.int32]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message of a conversation; content is the truth, `encoded` its exact companion or None.

    For system and user messages `encoded` is what `Prompt.segments` gave for this message before.
    For assistant messages it is the generated ids, the sampled eos included, under `ChatCodec.fingerprint`.
    """

    role: Role
    content: str
    encoded: Encoded | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """tokens: all the ids, the generation prompt included. segments[i]: what to store for message i.

    header_tokens: number of ids at the end of `tokens` that are the generation prompt (the reply's own header).
    opening_tokens: number of ids at the end of `tokens` that are the content of a message that is continued.
    """

    tokens: npt.NDArray[np.int32]
    segments: tuple[Encoded, ...]
    message_tokens: tuple[int, ...]
    header_tokens: int
    opening_tokens: int = 0


class ChatCodec(Protocol):
    """Turns conversations into ids and ids into text. Content never becomes control ids, whatever it contains."""

    @property
    def fingerprint(self) -> str:
        """Identifies tokenizer and template: ids stored under another fingerprint are encoded anew."""
        ...

    def prompt(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        namespace: str | None = None,
        now: datetime | None = None,
    ) -> Prompt:
        """The ids the model must see for this conversation. Ids that come with a message are reused while they are
        exact; only the others are encoded. message_tokens[i] counts the ids that message i adds: their sum +
        header_tokens is all of them.

        namespace: where to look for replies that were remembered; None looks nowhere. now: the date for templates that
        ask for one; it has to stay the same for a conversation, or its prefix changes.

        continue_final_message: the last message, an assistant's, is left without its end, for the model to go on with.

        Raises TemplateError when the model's template refuses the conversation or cannot be continued, InvalidRequest
        where a message is to be continued that is no reply, or beside a generation prompt.
        """
        ...

    def encode(self, text: str, *, continued: bool = False) -> npt.NDArray[np.int32]:
        """Plain text to ids; control tokens in it stay text. continued: other text stands before it."""
        ...

    def remember(
        self,
        namespace: str,
        prompt_tokens: npt.NDArray[np.int32],
        ids: Sequence[int] | npt.NDArray[np.int32],
        text: str,
    ) -> None:
        """Keeps the ids of a reply, so that a client which sends only its text back gets the very same ids."""
        ...

    def decode(self, ids: Sequence[int] | npt.NDArray[np.int32]) -> str:
        """Ids to text; control ids are left out, bytes that form no character become U+FFFD."""
        ...
