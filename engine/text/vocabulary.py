"""What every token id stands for, in bytes."""

from __future__ import annotations

from typing import Any

from engine.errors import ModelError


class Vocabulary:
    """id -> bytes, each entry worked out at its first use; built from a parsed tokenizer.json.

    Special tokens have no bytes. Added tokens that are not special (tags a reader may see) are their own text.
    """

    def __init__(self, tokenizer: dict[str, Any]) -> None:
        steps = _steps(tokenizer.get("decoder"))
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds
        if not self._byte_level and not kinds & {"ByteFallback", "Metaspace"}:
            raise ModelError(
                f"a tokenizer with the decoder {sorted(kinds)} is not supported: byte-level and SentencePiece are"
            )
        self._strips_space = any(_strips_first_space(step) for step in steps)
        self._tokens = _tokens(tokenizer)
        self._added = {token["id"]: "" if token["special"] else token["content"] for token in tokenizer["added_tokens"]}
        self._bytes: list[bytes | None] = [None] * len(self._tokens)
        self._to_byte = _characters_to_bytes()

    def __len__(self) -> int:
        """The largest id + 1."""
        return len(self._tokens)

    @property
    def strips_first_space(self) -> bool:
        """A text decoded from its start loses one leading space (SentencePiece marks words by it)."""
        return self._strips_space

    def bytes_of(self, token: int) -> bytes:
        """What this id adds to a text; nothing for control tokens and for ids that the vocabulary lacks."""
        if not 0 <= token < len(self._bytes):
            return b""
        known = self._bytes[token]
        if known is None:
            known = self._bytes[token] = self._work_out(token)
        return known

    def _work_out(self, token: int) -> bytes:
        if (added := self._added.get(token)) is not None:
            return added.encode()
        text = self._tokens[token]
        if text is None:
            return b""
        if self._byte_level:
            try:
                return bytes(self._to_byte[character] for character in text)
            except KeyError:
                return text.encode()
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            try:
                return bytes([int(text[3:5], 16)])
            except ValueError:
                return text.encode()
        return text.replace("▁", " ").encode()


def _tokens(tokenizer: dict[str, Any]) -> list[str | None]:
    model = tokenizer["model"]["vocab"]
    by_id = (
        {number: token for token, number in model.items()}
        if isinstance(model, dict)
        else dict(enumerate(t for t, _ in model))
    )
    by_id |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    tokens: list[str | None] = [None] * (max(by_id, default=-1) + 1)
    for number, token in by_id.items():
        tokens[number] = token
    return tokens


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _strips_first_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Strip":
        return bool(step["content"] == " " and step["start"] > 0)
    return bool(step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")


def _characters_to_bytes() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the other bytes are U+0100 and onwards."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
