"""Cutting generated ids so that they are the exact companion of the text that was shown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.text.api import ChatCodec

UNFINISHED = "\ufffd"
_CHARACTER_BYTES = 4
_TAIL = 2 * _CHARACTER_BYTES


def shown(text: str) -> str:
    """Generated text as it is stored and sent: U+0000, which databases refuse, becomes U+FFFD."""
    return text.replace("\0", UNFINISHED)


def reply_ids(
    codec: ChatCodec, ids: Sequence[int], heard: int, text: str, *, stopped: bool, ended: bool
) -> npt.NDArray[np.int32]:
    """The ids to store beside `text`.

    heard: how many ids had come when the last text came; later ones are dropped, as their text never came out.
    ended: the engine ended the text itself, so that later ids without any text (control tokens) stay.
    stopped: the last id is the end token (or a stop id), which stays in any case.
    """
    end = list(ids[-1:]) if stopped else []
    body = list(ids[: len(ids) - len(end)])
    if not (ended and codec.decode(body[heard:]) == ""):
        body = body[:heard]
    return np.asarray(_aligned(codec, body, text) + end, dtype=np.int32)


def _aligned(codec: ChatCodec, body: list[int], text: str) -> list[int]:
    """`body` without the bytes of an unfinished character: their token goes, its shown part is encoded anew."""
    if not codec.decode(body[-_TAIL:]).endswith(UNFINISHED):
        return body
    decoded = shown(codec.decode(body))
    excess = decoded[len(text) :]
    if not decoded.startswith(text) or not excess or excess.strip(UNFINISHED):
        return body
    for kept in range(len(body) - 1, max(len(body) - _CHARACTER_BYTES, 0) - 1, -1):
        decoded = shown(codec.decode(body[:kept]))
        if text.startswith(decoded):
            return body[:kept] + [int(token) for token in codec.encode(text[len(decoded) :], continued=True)]
    return body
