"""Text to ids with the control tokens under our own hand: they come from template literals only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from secrets import token_hex
from typing import Any

from tokenizers import Tokenizer


class Start(Enum):
    """What stands before a text, as far as its encoding depends on it."""

    OF_PROMPT = "prompt"
    AFTER_CONTROL = "control"
    AFTER_STRIPPING_CONTROL = "stripping"
    INSIDE = "inside"


@dataclass(frozen=True, slots=True)
class Control:
    """A control token in a template literal. It may swallow the whitespace on either side."""

    id: int
    text: str
    strips_left: bool
    strips_right: bool

    @property
    def after(self) -> Start:
        return Start.AFTER_STRIPPING_CONTROL if self.strips_right else Start.AFTER_CONTROL


Part = str | Control


class Encoder:
    """Encodes stretches of plain text between control tokens, in which no control token can be found.

    A control token is every added token that is special or has a character other than whitespace: they are taken out of
    the added tokens, the vocabulary and the merges. So what users write is spelt out, whatever it contains.
    """

    def __init__(self, tokenizer: dict[str, Any]) -> None:
        """tokenizer: a parsed tokenizer.json, which is left as it is."""
        controls = {
            token["content"]: Control(token["id"], token["content"], bool(token["lstrip"]), bool(token["rstrip"]))
            for token in tokenizer["added_tokens"]
            if token["special"] or token["content"].strip()
        }
        self._controls = controls
        longest_first = sorted((text for text in controls if text), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        plain = _without(tokenizer, controls)
        self._tokenizers = _variants(plain)

    @property
    def controls(self) -> dict[str, Control]:
        """By text."""
        return self._controls

    @property
    def control_pattern(self) -> re.Pattern[str]:
        """Matches any control token, the longest at each place."""
        return self._pattern

    def split(self, literal: str) -> tuple[Part, ...]:
        """A template literal as plain texts and control tokens, in order."""
        parts: list[Part] = []
        position = 0
        for match in self._pattern.finditer(literal):
            if match.start() > position:
                parts.append(literal[position : match.start()])
            parts.append(self._controls[match.group()])
            position = match.end()
        if position < len(literal):
            parts.append(literal[position:])
        return tuple(parts)

    def encode(self, parts: Iterable[Part], start: Start) -> list[int]:
        """The ids of plain texts and control tokens; neighbouring texts are encoded as one."""
        ids: list[int] = []
        stretch: list[str] = []
        for part in parts:
            if isinstance(part, str):
                stretch.append(part)
                continue
            ids += self._encode_stretch("".join(stretch), start, strip_end=part.strips_left)
            ids.append(part.id)
            stretch, start = [], part.after
        return ids + self._encode_stretch("".join(stretch), start, strip_end=False)

    def _encode_stretch(self, text: str, start: Start, *, strip_end: bool) -> list[int]:
        if start is Start.AFTER_STRIPPING_CONTROL:
            text = text.lstrip()
        if strip_end:
            text = text.rstrip()
        if not text:
            return []
        # The batch call is the one that lets other threads run meanwhile: a text of a megabyte takes seconds.
        ids: list[int] = self._tokenizers[start].encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids


def end_of(parts: Sequence[Part], start: Start) -> Start:
    """What stands before the text that follows `parts`."""
    for part in reversed(parts):
        if isinstance(part, Control):
            return part.after
        if part:
            return Start.INSIDE
    return start


def _without(tokenizer: dict[str, Any], controls: dict[str, Control]) -> dict[str, Any]:
    model = dict(tokenizer["model"])
    vocabulary = model["vocab"]
    kept = [token for token in tokenizer["added_tokens"] if token["content"] not in controls]
    # A model looks its unknown token up by text, so this one stays; without merges nothing joins into it.
    taken = controls.keys() - {model.get("unk_token")}
    if isinstance(vocabulary, dict):
        # An added token that the vocabulary lacks would be numbered anew.
        model["vocab"] = {text: number for text, number in vocabulary.items() if text not in taken}
        model["vocab"] |= {token["content"]: token["id"] for token in kept}
    else:  # a unigram list, where the place is the id: the text is replaced by one that nobody can guess
        model["vocab"] = [[token_hex(16) + text if text in taken else text, score] for text, score in vocabulary]
        kept = [token for token in kept if token["id"] < len(vocabulary)]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _touches(merge, controls)]
    bare = {"model": model, "added_tokens": kept, "post_processor": None, "truncation": None, "padding": None}
    return {**tokenizer, **bare}


def _touches(merge: str | list[str], controls: dict[str, Control]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left + right in controls or left in controls or right in controls


def _variants(plain: dict[str, Any]) -> dict[Start, Tokenizer]:
    """One tokenizer for each start; they differ only where a tokenizer marks the start of a text by a space."""
    later = _with_steps(plain, lambda step: _changed(step, inside=False))
    inside = _with_steps(plain, lambda step: _changed(step, inside=True))
    built: dict[str, Tokenizer] = {}

    def build(steps: dict[str, Any]) -> Tokenizer:
        key = json.dumps([steps.get("normalizer"), steps.get("pre_tokenizer")])
        if key not in built:
            built[key] = Tokenizer.from_str(json.dumps(steps))
        return built[key]

    after = build(later)
    return {
        Start.OF_PROMPT: build(plain),
        Start.AFTER_CONTROL: after,
        Start.AFTER_STRIPPING_CONTROL: after,
        Start.INSIDE: build(inside),
    }


def _with_steps(plain: dict[str, Any], change: Any) -> dict[str, Any]:
    def walk(step: dict[str, Any] | None, inner: str) -> dict[str, Any] | None:
        if step is None:
            return None
        if step["type"] == "Sequence":
            steps = [changed for each in step[inner] if (changed := walk(each, inner)) is not None]
            return {**step, inner: steps}
        changed_step: dict[str, Any] | None = change(deepcopy(step))
        return changed_step

    return {
        **plain,
        "normalizer": walk(plain.get("normalizer"), "normalizers"),
        "pre_tokenizer": walk(plain.get("pre_tokenizer"), "pretokenizers"),
    }


def _changed(step: dict[str, Any], *, inside: bool) -> dict[str, Any] | None:
    """A step as it acts on a text after a control token (inside: in the middle of a text). None: not at all.

    Metaspace marks the first text of a prompt or every one; Prepend and ByteLevel's prefix space mark every one.
    """
    kind = step["type"]
    if kind == "Metaspace" and (inside or step.get("prepend_scheme") == "first"):
        step.pop("add_prefix_space", None)
        return {**step, "prepend_scheme": "never"}
    if kind == "Prepend" and inside:
        return None
    if kind == "ByteLevel" and inside:
        return {**step, "add_prefix_space": False}
    return step
