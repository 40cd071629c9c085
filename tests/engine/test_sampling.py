"""One row's choice: greedy, temperature, nucleus, seeds, what is held back, and logits that are no use."""

from __future__ import annotations

import math

import pytest
import torch

from engine.api import SamplingParams
from engine.sampling import NoCandidate, Sampler

NO_EOS: frozenset[int] = frozenset()


def draws(params: SamplingParams, logits: list[float], count: int, eos: frozenset[int] = NO_EOS) -> list[int]:
    sampler = Sampler(params, eos)
    return [sampler.sample(torch.tensor(logits), generated) for generated in range(count)]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(top_p=0.0),
        SamplingParams(temperature=1e-5),
        SamplingParams(top_p=1e-9),
    ],
)
def test_greedy_takes_the_maximum(params: SamplingParams) -> None:
    assert draws(params, [0.0, 3.0, 2.9, -1.0], 20) == [1] * 20


def test_frequencies_follow_the_softmax() -> None:
    counts = torch.bincount(
        torch.tensor(draws(SamplingParams(seed=7, temperature=0.5), [0.0, 1.0, 0.5], 4000)), minlength=3
    )
    expected = torch.softmax(torch.tensor([0.0, 1.0, 0.5]) / 0.5, -1)
    torch.testing.assert_close(counts / 4000, expected, atol=0.03, rtol=0)


@pytest.mark.parametrize(("top_p", "allowed"), [(0.5, {0}), (0.6, {0, 1}), (0.85, {0, 1, 2}), (1.0, {0, 1, 2, 3})])
def test_nucleus_holds_the_fewest_tokens_that_reach_top_p(top_p: float, allowed: set[int]) -> None:
    logits = [math.log(p) for p in (0.55, 0.25, 0.15, 0.05)]
    assert set(draws(SamplingParams(seed=3, top_p=top_p), logits, 600)) == allowed


def test_a_flat_nucleus_wider_than_the_shortlist_is_exact() -> None:
    size = 5000
    seen = set(draws(SamplingParams(seed=1, top_p=0.9), [0.0] * size, 300))
    assert len(seen) > 250
    assert max(seen) < size


def test_same_seed_same_tokens_and_no_seed_differs() -> None:
    logits = [0.0] * 1000
    first = draws(SamplingParams(seed=5), logits, 20)
    assert first == draws(SamplingParams(seed=5), logits, 20)
    assert first != draws(SamplingParams(seed=6), logits, 20)
    assert draws(SamplingParams(), logits, 20) != draws(SamplingParams(), logits, 20)


def test_eos_and_stop_ids_wait_for_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(1,))
    assert draws(params, [9.0, 8.0, 7.0], 4, eos=frozenset({0})) == [2, 2, 0, 0]


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(top_p=0.5, seed=1)]
)
@pytest.mark.parametrize("logits", [[1.0, math.nan, 2.0], [-math.inf] * 3, [math.inf, 1.0, 2.0]])
def test_useless_logits_are_an_error_of_this_row(params: SamplingParams, logits: list[float]) -> None:
    with pytest.raises(NoCandidate):
        draws(params, logits, 1)


def test_tokens_of_no_probability_are_never_drawn() -> None:
    logits = [-math.inf, 0.0, -math.inf, 0.0, -math.inf]
    assert set(draws(SamplingParams(seed=2), logits, 400)) == {1, 3}


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": math.nan},
        {"top_p": 1.1},
        {"top_p": -1.0},
        {"seed": -1},
        {"seed": 2**63},
        {"max_tokens": -1},
        {"min_tokens": -1},
        {"max_tokens": 3, "min_tokens": 4},
    ],
)
def test_parameters_out_of_range_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        SamplingParams(**values)  # type: ignore[arg-type]
