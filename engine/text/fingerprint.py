"""What stored ids depend on, as short hashes: under another one they are encoded anew."""

from __future__ import annotations

import json
from hashlib import sha256

from engine.text.api import ChatMessage
from engine.text.assets import ChatAssets
from engine.text.encoder import Start
from engine.text.layout import Piece


def context_of(piece: Piece, message: ChatMessage, start: Start) -> str:
    """A short hash of all that a segment's ids depend on, the message's own content apart."""
    [content] = piece.content
    form = "" if content.text == message.content else f"{len(content.text)}"
    parts = (start.value, piece.header + piece.lead, piece.tail, form)
    return sha256("".join(f"{len(part)}:{part}" for part in parts).encode("utf-8", "surrogatepass")).hexdigest()[:8]


def fingerprint_of(assets: ChatAssets, template: str) -> str:
    """16 hex digits of tokenizer, template and the tokens it names."""
    named = json.dumps([template, assets.special_tokens], sort_keys=True)
    return sha256(f"{assets.tokenizer_json}\0{named}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
