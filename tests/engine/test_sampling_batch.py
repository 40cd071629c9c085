"""Rows of all kinds in one batch: the same to the bit alone and beside any others, and log probabilities."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.api import SampledLogprob, SamplingParams, TokenLogprob
from engine.sampling import Sampled, SamplingState
from tests.support.sampling import sample

STEPS = 4

KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_p=0.9),
    SamplingParams(seed=3, top_k=50, min_p=0.01),
    SamplingParams(seed=4, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3, logprobs=20),
    SamplingParams(seed=5, min_p=0.02, temperature=1.5),
    SamplingParams(seed=6, logit_bias=((5, 3.0),), min_tokens=3, stop_token_ids=(5,), logprobs=0),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, logprobs=3),
]


def run(vocab: int, members: list[int]) -> dict[int, list[Sampled]]:
    """What the sequences `members`, in this order in one batch, give in STEPS steps. Logits depend on the member."""
    prompts = [np.arange(member, member + 40, dtype=np.int32) for member in members]
    states = [SamplingState(KINDS[m], frozenset({0}), p) for m, p in zip(members, prompts, strict=True)]
    output: dict[int, list[Sampled]] = {member: [] for member in members}
    for step in range(STEPS):
        rows = [torch.randn(vocab, generator=torch.Generator().manual_seed(97 * m + step)) * 2 for m in members]
        for member, outcome in zip(
            members, sample(torch.stack(rows), states, lambda token: bytes([token % 256])), strict=True
        ):
            assert isinstance(outcome, Sampled)
            output[member].append(outcome)
    return output


@pytest.mark.parametrize("vocab", [67, 4096, 49_152, 50_001])
def test_a_row_is_the_same_alone_and_in_any_batch(vocab: int) -> None:
    alone = {member: run(vocab, [member])[member] for member in range(len(KINDS))}
    for members in ([0, 1, 2], [2, 1, 0], [5, 4, 3], [7, 6, 1], list(range(8)), list(reversed(range(8)))):
        assert run(vocab, members) == {member: alone[member] for member in members}


def test_a_batch_of_greedy_rows_is_one_argmax() -> None:
    rows = torch.randn(8, 300, generator=torch.Generator().manual_seed(0))
    states = [SamplingState(SamplingParams(temperature=0.0), frozenset(), np.ones(1, np.int32)) for _ in range(8)]
    expected = [Sampled(token) for token in rows.argmax(-1).tolist()]
    before = rows.clone()
    assert sample(rows, states, lambda _: b"") == expected
    assert torch.equal(rows, before)


@pytest.mark.parametrize("top", [0, 1, 5, 20])
@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.0), SamplingParams(seed=1, temperature=0.5, top_k=3, logit_bias=((9, 50.0),))],
)
def test_logprobs_are_those_of_the_raw_logits(params: SamplingParams, top: int) -> None:
    rows = torch.randn(1, 100, generator=torch.Generator().manual_seed(4)) * 3
    expected = rows[0].double().log_softmax(-1)
    state = SamplingState(replace(params, logprobs=top), frozenset(), np.ones(1, np.int32))
    [outcome] = sample(rows.clone(), [state], lambda token: bytes([token]))
    assert isinstance(outcome, Sampled)
    told = outcome.logprob
    assert told is not None
    assert (told.sampled.id, told.sampled.bytes) == (outcome.token, bytes([outcome.token]))
    assert [entry.id for entry in told.top] == expected.topk(top).indices.tolist()
    for entry in (told.sampled, *told.top):
        assert math.isclose(entry.logprob, float(expected[entry.id]), rel_tol=1e-12)


@pytest.mark.parametrize(
    ("logits", "top"),
    [
        ([-math.inf, 0.0, -math.inf], [1]),
        ([0.0, 0.0, -math.inf], [0, 1]),
        ([1e38, -1e38, 0.0], [0, 2, 1]),
    ],
)
def test_logprobs_are_finite(logits: list[float], top: list[int]) -> None:
    state = SamplingState(SamplingParams(temperature=0.0, logprobs=20), frozenset(), np.ones(1, np.int32))
    [outcome] = sample(torch.tensor([logits]), [state], lambda _: b"")
    assert isinstance(outcome, Sampled)
    assert isinstance(outcome.logprob, SampledLogprob)
    assert [entry.id for entry in outcome.logprob.top] == top
    assert all(math.isfinite(entry.logprob) and entry.logprob <= 0 for entry in outcome.logprob.top)
    assert isinstance(outcome.logprob.sampled, TokenLogprob)
