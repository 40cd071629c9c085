"""Parameters from outside: names and types checked here, ranges of sampling parameters by SamplingParams itself.

They are named, and written in JSON, as in OpenAI's interface and its usual extensions: logit_bias is an object from
token ids to numbers, stop a string or a list of them, top_k -1 all tokens, and response_format stands for `grammar`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from engine.api import SamplingParams
from sessions.content import check_text
from sessions.errors import InvalidInput
from sessions.response_format import grammar_of


def _integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return _integer(value) or isinstance(value, float)


def _boolean(value: object) -> bool:
    return isinstance(value, bool)


def _token_ids(value: object) -> bool:
    return isinstance(value, list | tuple) and all(_integer(item) and 0 <= item < 2**31 for item in value)


def _bias(value: object) -> bool:
    return isinstance(value, Mapping) and all(_written_id(key) and _number(bias) for key, bias in value.items())


def _written_id(value: object) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 10


def _strings(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(item, str) for item in value))


def _response_format(value: object) -> bool:
    try:
        grammar_of(value)
    except ValueError:
        return False
    return True


_KINDS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "temperature": ("a number", _number),
    "top_p": ("a number", _number),
    "top_k": ("an integer", _integer),
    "min_p": ("a number", _number),
    "repetition_penalty": ("a number", _number),
    "presence_penalty": ("a number", _number),
    "frequency_penalty": ("a number", _number),
    "logit_bias": ("an object from token ids to numbers", _bias),
    "seed": ("an integer", _integer),
    "max_tokens": ("an integer", _integer),
    "min_tokens": ("an integer", _integer),
    "ignore_eos": ("a boolean", _boolean),
    "adapter": ("a string", lambda value: isinstance(value, str)),
    "stop": ("a string or a list of strings", _strings),
    "stop_token_ids": ("a list of token ids", _token_ids),
    "response_format": ("a response format of type text, json_object, json_schema or regex", _response_format),
}


def check_params(params: Mapping[str, Any] | None) -> dict[str, Any]:
    """The given parameters as they are stored: known names, right types, None left out. Raises InvalidInput."""
    checked: dict[str, Any] = {}
    for name, value in (params or {}).items():
        if name not in _KINDS:
            raise InvalidInput("params", f"unknown parameter; known are {', '.join(sorted(_KINDS))}")
        if value is None:
            continue
        kind, fits = _KINDS[name]
        if not fits(value):
            raise InvalidInput(f"params.{name}", f"must be {kind}")
        for text in _texts(value):
            check_text(f"params.{name}", text)
        checked[name] = list(value) if isinstance(value, tuple) else value
    return checked


def resolve_params(defaults: SamplingParams, *layers: Mapping[str, Any] | None) -> SamplingParams:
    """`defaults` overlaid by each layer in turn: the last one wins, None falls through. Raises InvalidInput."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged |= check_params(layer)
    merged.pop("adapter", None)
    try:
        return dataclasses.replace(defaults, **_as_the_engine_takes_them(merged))
    except ValueError as error:
        raise InvalidInput("params", str(error)) from None


def resolve_adapter(loaded: Collection[str], *layers: Mapping[str, Any] | None) -> str | None:
    """The adapter of the last layer that names one; "" is the model itself. Raises InvalidInput unless it is loaded."""
    name = ""
    for layer in layers:
        name = check_params(layer).get("adapter", name)
    if name and name not in loaded:
        raise InvalidInput("params.adapter", "names no adapter that is loaded")
    return name or None


def _as_the_engine_takes_them(checked: dict[str, Any]) -> dict[str, Any]:
    given = dict(checked)
    if given.get("top_k") == -1:
        given["top_k"] = 0
    if "stop_token_ids" in given:
        given["stop_token_ids"] = tuple(given["stop_token_ids"])
    if "stop" in given:
        given["stop"] = (given["stop"],) if isinstance(given["stop"], str) else tuple(given["stop"])
    if "logit_bias" in given:
        given["logit_bias"] = tuple((int(token), bias) for token, bias in given["logit_bias"].items())
    if "response_format" in given:
        given["grammar"] = grammar_of(given.pop("response_format"))
    return given


def _texts(value: object) -> Iterator[str]:
    """Every string in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
