"""Sampling parameters and the adapter from outside: layers, names and types."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from engine.api import Grammar, SamplingParams
from sessions import InvalidInput
from sessions.params import check_params, resolve_adapter, resolve_params

DEFAULTS = SamplingParams(temperature=0.6, top_p=0.95)
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 1}
SCHEMA = '{"type": "object", "default": null}'
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": json.loads(SCHEMA), "strict": None}}
REGEX_FORMAT = {"type": "regex", "pattern": "a+"}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([], DEFAULTS),
        ([None, {}], DEFAULTS),
        ([{"temperature": 0}], SamplingParams(temperature=0, top_p=0.95)),
        ([{"temperature": 0.1}, {"temperature": 0.2}], SamplingParams(temperature=0.2, top_p=0.95)),
        ([{"temperature": 0.1}, {"temperature": None}], SamplingParams(temperature=0.1, top_p=0.95)),
        ([{"max_tokens": 5}, {"min_tokens": 5}], SamplingParams(0.6, 0.95, max_tokens=5, min_tokens=5)),
        ([{"stop_token_ids": [1, 2], "ignore_eos": True}], SamplingParams(0.6, 0.95, None, None, 0, True, (1, 2))),
        ([{"adapter": "ann"}], DEFAULTS),
        ([{"top_k": 5, "min_p": 0.1}], SamplingParams(0.6, 0.95, top_k=5, min_p=0.1)),
        ([{"top_k": 5}, {"top_k": -1}], SamplingParams(0.6, 0.95)),
        ([{"repetition_penalty": 1.1, "presence_penalty": 1}], replace(DEFAULTS, **PENALTIES)),
        ([{"frequency_penalty": -0.5}], SamplingParams(0.6, 0.95, frequency_penalty=-0.5)),
        ([{"logit_bias": {"7": 5, "8": -1.5}}], SamplingParams(0.6, 0.95, logit_bias=((7, 5), (8, -1.5)))),
        ([{"stop": "x"}], SamplingParams(0.6, 0.95, stop=("x",))),
        ([{"stop": "x"}, {"stop": ["y", "z"]}], SamplingParams(0.6, 0.95, stop=("y", "z"))),
        ([{"response_format": {"type": "json_object"}}], SamplingParams(0.6, 0.95, grammar=Grammar("json_object"))),
        ([{"response_format": SCHEMA_FORMAT}], SamplingParams(0.6, 0.95, grammar=Grammar("json_schema", SCHEMA))),
        ([{"response_format": REGEX_FORMAT}], SamplingParams(0.6, 0.95, grammar=Grammar("regex", "a+"))),
        ([{"response_format": REGEX_FORMAT}, {"response_format": {"type": "text"}}], DEFAULTS),
        ([{"seed": 2**63 - 1}], SamplingParams(0.6, 0.95, seed=2**63 - 1)),
    ],
)
def test_the_last_layer_wins(layers: list[dict[str, Any] | None], expected: SamplingParams) -> None:
    assert resolve_params(DEFAULTS, *layers) == expected


@pytest.mark.parametrize(
    ("layers", "field"),
    [
        ([{"best_of": 5}], "params"),
        ([{"logprobs": 5}], "params"),
        ([{"top_k": 5.0}], "params.top_k"),
        ([{"top_k": -2}], "params"),
        ([{"min_p": "0.1"}], "params.min_p"),
        ([{"repetition_penalty": 0}], "params"),
        ([{"presence_penalty": True}], "params.presence_penalty"),
        ([{"frequency_penalty": 2.5}], "params"),
        ([{"logit_bias": [[1, 2]]}], "params.logit_bias"),
        ([{"logit_bias": {"x": 2}}], "params.logit_bias"),
        ([{"logit_bias": {"-1": 2}}], "params.logit_bias"),
        ([{"logit_bias": {"1": "2"}}], "params.logit_bias"),
        ([{"logit_bias": {"1": 101}}], "params"),
        ([{"stop": 5}], "params.stop"),
        ([{"stop": ["a", 5]}], "params.stop"),
        ([{"stop": ["a", ""]}], "params"),
        ([{"stop": "a\0"}], "params.stop"),
        ([{"response_format": "json"}], "params.response_format"),
        ([{"response_format": {"type": "xml"}}], "params.response_format"),
        ([{"response_format": {"type": "text", "more": 1}}], "params.response_format"),
        ([{"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}], "params.response_format"),
        ([{"response_format": {"type": "json_schema", "schema": {}}}], "params.response_format"),
        ([{"response_format": {"type": "regex", "pattern": "\ud800"}}], "params.response_format"),
        ([{"temperature": "1"}], "params.temperature"),
        ([{"temperature": True}], "params.temperature"),
        ([{"temperature": 2.1}], "params"),
        ([{"temperature": float("nan")}], "params"),
        ([{"top_p": -0.1}], "params"),
        ([{"seed": 1.0}], "params.seed"),
        ([{"seed": 2**63}], "params"),
        ([{"max_tokens": -1}], "params"),
        ([{"max_tokens": False}], "params.max_tokens"),
        ([{"min_tokens": 2}, {"max_tokens": 1}], "params"),
        ([{"ignore_eos": 1}], "params.ignore_eos"),
        ([{"adapter": 5}], "params.adapter"),
        ([{"stop_token_ids": 5}], "params.stop_token_ids"),
        ([{"stop_token_ids": [1, "2"]}], "params.stop_token_ids"),
        ([{"stop_token_ids": [-1]}], "params.stop_token_ids"),
        ([{"stop_token_ids": [2**31]}], "params.stop_token_ids"),
    ],
)
def test_what_cannot_be_used_is_named(layers: list[dict[str, Any]], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        resolve_params(DEFAULTS, *layers)
    assert caught.value.field == field


def test_what_is_stored_is_plain() -> None:
    given = {"seed": None, "stop_token_ids": (1, 2), "stop": ("a",), "top_p": 1, "response_format": SCHEMA_FORMAT}
    stored = {"stop_token_ids": [1, 2], "stop": ["a"], "top_p": 1, "response_format": SCHEMA_FORMAT}
    assert check_params(given) == stored


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([], None),
        ([None, {"seed": 1}], None),
        ([{"adapter": "ann"}], "ann"),
        ([{"adapter": "ann"}, {}], "ann"),
        ([{"adapter": "ann"}, {"adapter": None}], "ann"),
        ([{"adapter": "ann"}, {"adapter": "bob"}], "bob"),
        ([{"adapter": "ann"}, {"adapter": ""}], None),
        ([{"adapter": "gone"}, {"adapter": "bob"}], "bob"),
    ],
)
def test_the_last_adapter_named_is_used(layers: list[dict[str, Any] | None], expected: str | None) -> None:
    assert resolve_adapter(("ann", "bob"), *layers) == expected


@pytest.mark.parametrize("layers", [[{"adapter": "eve"}], [{"adapter": "ann"}, {"adapter": "eve"}]])
def test_an_adapter_must_be_loaded(layers: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidInput) as caught:
        resolve_adapter(("ann",), *layers)
    assert caught.value.field == "params.adapter"
