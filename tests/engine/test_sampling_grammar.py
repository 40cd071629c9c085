"""Grammars: what may follow, where the text ends, and what is refused before it reaches the engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine.api import Grammar, SamplingParams
from engine.errors import InvalidRequest
from engine.sampling import GrammarCompiler, NoCandidate, Sampled, SamplingState
from engine.text import ChatAssets, Codec
from tests.support.sampling import sample
from tests.support.tiny_models import ascii_tokenizer

PROMPT = np.array([5], dtype=np.int32)
PADDING = 5
"""Columns of the logits beyond the tokenizer's ids, as many models have."""

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a", "b", None]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
JSON_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec(ChatAssets(ascii_tokenizer().to_str(), None, {}, eos_ids=(0, 2)))


@pytest.fixture(scope="module")
def compiler(codec: Codec) -> GrammarCompiler:
    return GrammarCompiler(codec.vocabulary, codec.eos_ids, lambda text: codec.encode(text).tolist())


def logits(codec: Codec, seed: int) -> torch.Tensor:
    """One row that likes the ids of no text best."""
    row = torch.randn(1, codec.vocab_size + PADDING, generator=torch.Generator().manual_seed(seed)) * 3
    row[:, codec.vocab_size :] = 20
    return row


def run(codec: Codec, compiler: GrammarCompiler, params: SamplingParams, steps: int = 400) -> list[int]:
    """The ids of one sequence up to its eos id."""
    assert params.grammar is not None
    state = SamplingState(params, codec.eos_ids, PROMPT, compiler.matcher(params.grammar))
    ids: list[int] = []
    while len(ids) < steps and not state.ended:
        [outcome] = sample(logits(codec, len(ids)), [state], codec.vocabulary.bytes_of)
        assert isinstance(outcome, Sampled), outcome
        ids.append(outcome.token)
    return ids


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "kind"]
        and len(value["name"]) <= 8
        and value["age"] in range(151)
        and value["kind"] in ("a", "b", None)
    )


GRAMMARS: list[tuple[Grammar, Callable[[str], object]]] = [
    (JSON_SCHEMA, is_person),
    (Grammar("json_schema", '{"type": "array", "items": {"type": "boolean"}, "maxItems": 9}'), json.loads),
    (Grammar("regex", r"[A-C]{2,5}/\d+\n(?i:x)"), re.compile(r"[A-C]{2,5}/\d+\n[xX]").fullmatch),
    (Grammar("regex", r'"a\\b"|/'), re.compile(r'"a\\b"|/').fullmatch),
]


@pytest.mark.parametrize(("grammar", "fits"), GRAMMARS, ids=[grammar.source for grammar, _ in GRAMMARS])
@pytest.mark.parametrize("params", [{"seed": 1}, {"seed": 2, "top_p": 0.7}, {"seed": 3, "top_k": 3, "min_p": 0.1}])
def test_the_text_is_what_was_asked_for(
    codec: Codec, compiler: GrammarCompiler, grammar: Grammar, fits: Callable[[str], object], params: dict[str, Any]
) -> None:
    ids = run(codec, compiler, SamplingParams(grammar=grammar, **params))
    assert ids[-1] in codec.eos_ids
    assert not set(ids[:-1]) & codec.eos_ids
    assert fits(codec.decode(ids))


def test_any_object_is_an_object_as_far_as_it_goes(codec: Codec, compiler: GrammarCompiler) -> None:
    ids = run(codec, compiler, SamplingParams(grammar=Grammar("json_object"), seed=4), steps=2000)
    assert isinstance(json.loads(codec.decode(ids)), dict) if ids[-1] in codec.eos_ids else len(ids) == 2000
    assert codec.decode(ids).startswith("{")


@pytest.mark.parametrize(
    ("grammar", "params", "length"),
    [
        (Grammar("regex", "a{3}"), {}, 4),
        (Grammar("regex", "a{3}"), {"min_tokens": 10}, 4),  # where only the end may follow, it is not held back
        (Grammar("regex", "a{3}"), {"ignore_eos": True}, 4),  # nothing can come after the end of a grammar
        (Grammar("regex", "a{3}"), {"logit_bias": ((0, -100.0), (2, -100.0))}, 4),
        (Grammar("regex", "a{0,9}"), {"logit_bias": ((0, 100.0),)}, 1),
        (Grammar("regex", "a{0,9}"), {"logit_bias": ((0, 100.0),), "min_tokens": 5}, 6),
        (Grammar("regex", "a{0,9}"), {"logit_bias": ((0, 100.0),), "min_tokens": 50}, 10),
        (Grammar("regex", ""), {}, 1),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_the_text_ends(
    codec: Codec,
    compiler: GrammarCompiler,
    grammar: Grammar,
    params: dict[str, Any],
    length: int,
    temperature: float,
) -> None:
    ids = run(codec, compiler, SamplingParams(grammar=grammar, temperature=temperature, seed=1, **params))
    assert (len(ids), ids[-1] in codec.eos_ids) == (length, True)


def test_bias_and_penalties_leave_a_candidate(codec: Codec, compiler: GrammarCompiler) -> None:
    params = SamplingParams(
        grammar=Grammar("regex", "a{20}"),
        seed=1,
        top_p=0.1,
        repetition_penalty=2.0,
        frequency_penalty=2.0,
        logit_bias=tuple((id, -100.0) for id in range(codec.vocab_size)),
    )
    assert codec.decode(run(codec, compiler, params)) == "a" * 20


def test_greedy_beside_masked_rows_has_no_nan(codec: Codec, compiler: GrammarCompiler) -> None:
    greedy = SamplingParams(temperature=0.0, logprobs=3)
    masked = SamplingParams(grammar=JSON_SCHEMA, seed=1, top_p=0.9, logprobs=3)
    states = [
        SamplingState(greedy, codec.eos_ids, PROMPT),
        SamplingState(masked, codec.eos_ids, PROMPT, compiler.matcher(JSON_SCHEMA)),
        SamplingState(greedy, codec.eos_ids, PROMPT),
    ]
    ids = []
    for step in range(8):
        rows = torch.cat([logits(codec, 3 * step + place) for place in range(3)])
        best = rows.argmax(-1).tolist()
        first, between, last = sample(rows, states, codec.vocabulary.bytes_of)
        for outcome in (first, between, last):
            assert isinstance(outcome, Sampled)
            assert outcome.logprob is not None
            assert np.isfinite([entry.logprob for entry in (outcome.logprob.sampled, *outcome.logprob.top)]).all()
        assert isinstance(first, Sampled)
        assert isinstance(between, Sampled)
        assert isinstance(last, Sampled)
        assert [first.token, last.token] == [best[0], best[2]]
        ids.append(between.token)
    assert codec.decode(ids).startswith("{")


def test_a_grammar_that_is_lost_fails_its_row_alone(codec: Codec, compiler: GrammarCompiler) -> None:
    lost = SamplingState(SamplingParams(grammar=JSON_SCHEMA), codec.eos_ids, PROMPT, compiler.matcher(JSON_SCHEMA))
    lost.advance(codec.encode("x").tolist()[0])
    greedy = SamplingState(SamplingParams(temperature=0.0), codec.eos_ids, PROMPT)
    broken, well = sample(torch.cat([logits(codec, 1)] * 2), [lost, greedy], codec.vocabulary.bytes_of)
    assert isinstance(broken, NoCandidate)
    assert isinstance(well, Sampled)


def test_sequences_of_one_grammar_are_independent(codec: Codec, compiler: GrammarCompiler) -> None:
    first, second = compiler.matcher(JSON_SCHEMA), compiler.matcher(JSON_SCHEMA)
    before = second.allowed(codec.vocab_size)
    first.advance(codec.encode("{").tolist()[0])
    assert not np.array_equal(first.allowed(codec.vocab_size), before)
    assert np.array_equal(second.allowed(codec.vocab_size), before)


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        (Grammar("json_schema", "{SECRET"), "not well formed"),
        (Grammar("json_schema", '{"not": ' * 6_000), "not well formed"),
        (Grammar("json_schema", ""), "an object"),
        (Grammar("json_schema", "false"), "an object"),
        (Grammar("json_schema", '{"x-guidance": {"SECRET": 1}}'), "unknown field"),
        (Grammar("json_schema", "[]"), "an object"),
        (Grammar("json_schema", '{"type": "SECRET"}'), "Invalid type"),
        (Grammar("json_schema", '{"not": {}, "SECRET": 1, "if": {}}'), "not supported"),
        (Grammar("json_schema", '{"$ref": "http://SECRET"}'), "not present in a registry"),
        (Grammar("json_schema", '{"type": "string", "pattern": "(SECRET"}'), "cannot be used"),
        (Grammar("json_schema", '{"type": "integer", "minimum": 2, "maximum": 1}'), "Unsatisfiable"),
        (Grammar("json_schema", '{"const": "\\ud800"}'), "not well formed"),
        (Grammar("json_schema", "{" + "x" * 70_000), "at most"),
        (Grammar("regex", "(SECRET"), "unclosed group"),
        (Grammar("regex", "\ud800"), "not well formed"),
        (Grammar("regex", "(?=SECRET)"), "look-around"),
        (Grammar("regex", "[z-a]"), "invalid character class range"),
        (Grammar("regex", ".*" * 300), "cannot be used"),
        (Grammar("regex", "a" * 70_000), "at most"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_used_is_refused(compiler: GrammarCompiler, grammar: Grammar, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        compiler.matcher(grammar)
    assert "SECRET" not in str(caught.value)


def test_a_model_without_an_end_token_takes_no_grammar(codec: Codec) -> None:
    compiler = GrammarCompiler(codec.vocabulary, frozenset(), lambda text: codec.encode(text).tolist())
    with pytest.raises(InvalidRequest, match="no token that ends"):
        compiler.matcher(JSON_SCHEMA)
