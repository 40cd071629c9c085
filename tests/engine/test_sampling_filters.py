"""The filters against transformers' own, the draw against the distribution, and rows that are no use."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.api import SamplingParams
from engine.sampling import NoCandidate, Sampled, SamplingState
from engine.sampling.draw import SHORTLIST, candidates, draw
from tests.support.sampling import sample

NO_EOS: frozenset[int] = frozenset()
PROMPT = np.array([1], dtype=np.int32)
INF = math.inf


def state(params: SamplingParams, eos: Iterable[int] = (), prompt: np.ndarray = PROMPT) -> SamplingState:
    return SamplingState(params, frozenset(eos), prompt)


def bytes_of(token: int) -> bytes:
    return bytes([token % 256])


def draws(params: SamplingParams, logits: list[float], count: int, eos: Iterable[int] = ()) -> list[int]:
    """`count` tokens of one sequence whose logits never change."""
    sequence = state(params, eos)
    outcomes = [sample(torch.tensor([logits]), [sequence], bytes_of)[0] for _ in range(count)]
    assert all(isinstance(outcome, Sampled) for outcome in outcomes), outcomes
    return [outcome.token for outcome in outcomes if isinstance(outcome, Sampled)]


def random_row(size: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


FILTERS = [
    SamplingParams(top_k=1, seed=0),
    SamplingParams(top_k=5, seed=0),
    SamplingParams(top_k=1500, seed=0),
    SamplingParams(top_k=10**6, seed=0),
    SamplingParams(top_p=1e-6, seed=0),
    SamplingParams(top_p=0.3, temperature=0.5, seed=0),
    SamplingParams(top_p=0.9, seed=0),
    SamplingParams(top_p=0.999, temperature=1.7, seed=0),
    SamplingParams(min_p=0.01, seed=0),
    SamplingParams(min_p=1.0, seed=0),
    SamplingParams(min_p=0.2, temperature=1.5, seed=0),
    SamplingParams(top_k=40, top_p=0.8, seed=0),
    SamplingParams(top_k=2000, top_p=0.99, min_p=0.001, temperature=1.3, seed=0),
    SamplingParams(top_p=0.95, min_p=0.05, temperature=0.7, seed=0),
]


@pytest.mark.parametrize("scale", [0.3, 3.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_candidates_are_those_of_transformers(params: SamplingParams, scale: float) -> None:
    row = random_row(6000, seed=1, scale=scale)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    expected = warpers(torch.empty(1, 0, dtype=torch.int64), row[None].double())[0]
    ids, weights = candidates(row.numpy(), int(row.argmax()), params)
    assert ids.tolist() == torch.isfinite(expected).nonzero().flatten().tolist()
    np.testing.assert_allclose(weights / weights.sum(), expected.softmax(-1)[ids].numpy(), rtol=1e-9)


@pytest.mark.parametrize("penalty", [0.7, 1.3, 2.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    prompt = np.array([3, 5, 5, 9], dtype=np.int32)
    sequence = state(SamplingParams(repetition_penalty=penalty), prompt=prompt)
    seen = prompt.tolist()
    for token in (7, 5, 11, 7):
        sequence.advance(token)
        seen.append(token)
        row = random_row(20, seed=token)
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([seen]), row[None].clone())[0]
        edited = row.numpy().copy()
        sequence.edit(edited)
        assert edited.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("params", "output", "expected"),
    [
        ({"presence_penalty": 0.5}, [2, 2, 3], [0, 0, -0.5, -0.5]),
        ({"frequency_penalty": 0.5}, [2, 2, 3], [0, 0, -1.0, -0.5]),
        ({"frequency_penalty": -1.0, "presence_penalty": 2.0}, [2, 2, 3], [0, 0, 0, -1.0]),
        ({"logit_bias": ((0, 4.0), (3, -100.0), (0, 1.0))}, [], [5.0, 0, 0, -100.0]),
        ({"presence_penalty": 1.0, "logit_bias": ((2, 0.25),)}, [2], [0, 0, -0.75, 0]),
        ({"presence_penalty": 1.0}, list(range(4)) * 50, [-1.0] * 4),
        ({"min_tokens": 3, "stop_token_ids": (1,)}, [3], [-INF, -INF, 0, 0]),
        ({"min_tokens": 1, "stop_token_ids": (1,)}, [3], [0, 0, 0, 0]),
        ({"min_tokens": 3, "logit_bias": ((0, 100.0),)}, [], [-INF, 0, 0, 0]),
    ],
)
def test_what_is_added_to_the_logits(params: dict[str, object], output: list[int], expected: list[float]) -> None:
    sequence = state(SamplingParams(**params), eos=[0])  # type: ignore[arg-type]
    for token in output:
        sequence.advance(token)
    row = np.zeros(4, dtype=np.float32)
    sequence.edit(row)
    assert row.tolist() == expected


def test_an_extreme_repetition_penalty_leaves_finite_logits() -> None:
    sequence = state(SamplingParams(temperature=0.0, repetition_penalty=0.01))
    outcome = sample(torch.tensor([[1.0, 3e38, 3.0]]), [sequence], bytes_of)
    assert outcome == [Sampled(1)]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, top_k=7, min_p=0.5, seed=3),
        SamplingParams(top_p=0.0),
        SamplingParams(top_k=1),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=1e-5),
        SamplingParams(temperature=1e-320),
        SamplingParams(top_p=1e-9),
    ],
    ids=str,
)
def test_greedy_takes_the_maximum(params: SamplingParams) -> None:
    assert draws(params, [0.0, 3.0, 2.9, -1.0], 20) == [1] * 20


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.85}, {0, 1, 2}),
        ({"top_k": 2}, {0, 1}),
        ({"min_p": 0.25}, {0, 1, 2}),
        ({"min_p": 0.3}, {0, 1}),
        ({"top_k": 3, "top_p": 0.9}, {0, 1, 2}),
        ({"temperature": 0.5, "top_p": 0.9}, {0, 1}),
        ({"logit_bias": ((0, -100.0),), "top_p": 0.7}, {1, 2}),
    ],
)
def test_frequencies_follow_the_distribution(params: dict[str, object], allowed: set[int]) -> None:
    probabilities = np.array([0.55, 0.25, 0.15, 0.05])
    settings = SamplingParams(**{"seed": 7, **params})  # type: ignore[arg-type]
    counts = np.bincount(draws(settings, np.log(probabilities).tolist(), 3000), minlength=4) / 3000
    kept = np.array([probabilities[token] if token in allowed else 0.0 for token in range(4)])
    kept = kept ** (1 / settings.temperature)
    np.testing.assert_allclose(counts, kept / kept.sum(), atol=0.03)
    assert set(np.flatnonzero(counts).tolist()) == allowed


def test_a_nucleus_wider_than_the_shortlist_is_exact() -> None:
    ids, _ = candidates(np.zeros(5 * SHORTLIST, dtype=np.float32), 0, SamplingParams(top_p=0.9))
    assert ids.tolist() == list(range(math.ceil(0.9 * 5 * SHORTLIST)))


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.4}])
def test_among_equals_the_lower_ids_are_kept(params: dict[str, float]) -> None:
    row = np.array([0.0, 1.0, 1.0, -INF, 1.0, 1.0], dtype=np.float32)
    ids, _ = candidates(row, 1, SamplingParams(temperature=0.05, **params))  # type: ignore[arg-type]
    assert ids.tolist() == [1, 2]


@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32) | st.just(-INF), min_size=1, max_size=40),
    temperature=st.floats(1e-300, 2.0),
    top_k=st.integers(0, 50),
    top_p=st.floats(1e-300, 1.0),
    min_p=st.floats(0.0, 1.0),
    uniform=st.floats(0.0, 1.0, exclude_max=True),
)
def test_there_is_always_a_candidate(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> None:
    row = np.array(values, dtype=np.float32)
    best = int(row.argmax())
    assume(np.isfinite(row[best]))
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, weights = candidates(row, best, params)
    assert best in ids
    assert weights.max() == 1.0
    token = draw(row, best, params, uniform)
    assert token in ids
    assert np.isfinite(row[token])


def test_tokens_of_no_probability_are_never_drawn() -> None:
    logits = [-INF, 0.0, -INF, 0.0, -INF]
    for params in ({}, {"top_k": 4}, {"top_p": 0.99}, {"min_p": 0.01}):
        assert set(draws(SamplingParams(seed=2, **params), logits, 200)) == {1, 3}  # type: ignore[arg-type]


def test_same_seed_same_tokens_and_no_seed_differs() -> None:
    logits = [0.0] * 1000
    first = draws(SamplingParams(seed=5), logits, 20)
    assert first == draws(SamplingParams(seed=5), logits, 20)
    assert first != draws(SamplingParams(seed=6), logits, 20)
    assert draws(SamplingParams(), logits, 20) != draws(SamplingParams(), logits, 20)


def test_eos_and_stop_ids_wait_for_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(1,))
    assert draws(params, [9.0, 8.0, 7.0], 4, eos=[0]) == [2, 2, 0, 0]


USELESS: list[tuple[list[float], dict[str, object]]] = [
    ([1.0, math.nan, 2.0], {}),
    ([math.nan] * 3, {}),
    ([-INF] * 3, {}),
    ([INF, 1.0, 2.0], {}),
    ([math.nan, 1.0, 2.0], {"logit_bias": ((1, 5.0),)}),
    ([1.0, 2.0, 3.0], {"min_tokens": 1, "stop_token_ids": (0, 1, 2)}),
]


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"seed": 1}, {"top_p": 0.5, "seed": 1}, {"top_k": 2, "logprobs": 2}], ids=str
)
@pytest.mark.parametrize(("logits", "more"), USELESS)
def test_useless_logits_fail_their_row_alone(
    params: dict[str, object], logits: list[float], more: dict[str, object]
) -> None:
    rows = torch.tensor([[1.0, 2.0, 0.0], logits, [5.0, 2.0, 0.0]])
    greedy = SamplingParams(temperature=0.0)
    states = [state(greedy), state(SamplingParams(**params, **more)), state(greedy)]  # type: ignore[arg-type]
    first, broken, last = sample(rows, states, bytes_of)
    assert (first, last) == (Sampled(1), Sampled(0))
    assert isinstance(broken, NoCandidate)
    assert broken.reason


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": math.nan},
        {"top_p": 1.1},
        {"top_p": -1.0},
        {"top_k": -1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5},
        {"logprobs": 21},
        {"seed": -1},
        {"seed": 2**63},
        {"max_tokens": -1},
        {"min_tokens": -1},
        {"max_tokens": 3, "min_tokens": 4},
        {"stop": ("",)},
        {"logit_bias": ((1, 101.0),)},
        {"logit_bias": ((1, math.nan),)},
    ],
)
def test_parameters_out_of_range_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must|takes"):
        SamplingParams(**values)  # type: ignore[arg-type]
