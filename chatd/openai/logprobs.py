"""Log probabilities as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.api import SampledLogprob, TokenLogprob


def logprobs_json(entries: Iterable[SampledLogprob]) -> dict[str, Any]:
    """One entry for each token, those of control tokens included, whose text is empty and whose bytes are null."""
    content = [{**_token(entry.sampled), "top_logprobs": [_token(other) for other in entry.top]} for entry in entries]
    return {"content": content, "refusal": None}


def _token(entry: TokenLogprob) -> dict[str, Any]:
    """token: the text, with U+FFFD for a part of a character, which `bytes` has exactly."""
    return {
        "token": entry.bytes.decode("utf-8", "replace"),
        "logprob": entry.logprob,
        "bytes": list(entry.bytes) or None,
    }
