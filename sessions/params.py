"""Parameters from outside: names and types checked here, ranges of sampling parameters by SamplingParams itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from engine.api import SamplingParams
from sessions.errors import InvalidInput


def _integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return _integer(value) or isinstance(value, float)


def _boolean(value: object) -> bool:
    return isinstance(value, bool)


def _token_ids(value: object) -> bool:
    return isinstance(value, list | tuple) and all(_integer(item) and 0 <= item < 2**31 for item in value)


_KINDS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "temperature": ("a number", _number),
    "top_p": ("a number", _number),
    "seed": ("an integer", _integer),
    "max_tokens": ("an integer", _integer),
    "min_tokens": ("an integer", _integer),
    "ignore_eos": ("a boolean", _boolean),
    "adapter": ("a string", lambda value: isinstance(value, str)),
    "stop_token_ids": ("a list of token ids", _token_ids),
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
        checked[name] = list(value) if name == "stop_token_ids" else value
    return checked


def resolve_params(defaults: SamplingParams, *layers: Mapping[str, Any] | None) -> SamplingParams:
    """`defaults` overlaid by each layer in turn: the last one wins, None falls through. Raises InvalidInput."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged |= check_params(layer)
    merged.pop("adapter", None)
    if "stop_token_ids" in merged:
        merged["stop_token_ids"] = tuple(merged["stop_token_ids"])
    try:
        return dataclasses.replace(defaults, **merged)
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
