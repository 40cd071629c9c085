"""Tokens that are chosen where the logits are: the same as the host's, or a verdict that says why not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.api import SamplingParams
from engine.sampling import Chosen, DeviceChooser, Draw, DrawTables, SamplingState, Verdict
from engine.sampling.draw import SHORTLIST, draw
from engine.sampling.most_likely import FlashInferMostLikely, MostLikely, SortedMostLikely, most_likely_by_flashinfer
from tests.support import flashinfer_standin

VOCAB = 3000
ROWS = 24

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "cold": SamplingParams(temperature=1e-3),
    "hot": SamplingParams(temperature=2.0),
    "top_k": SamplingParams(top_k=20),
    "top_k and more": SamplingParams(top_k=50, top_p=0.9, min_p=0.02, temperature=0.7),
    "largest top_k": SamplingParams(top_k=SHORTLIST, temperature=2.0),
    "top_p": SamplingParams(top_p=0.9),
    "tiny top_p": SamplingParams(top_p=1e-9),
    "min_p": SamplingParams(min_p=0.05),
    "top_p and min_p": SamplingParams(top_p=0.95, min_p=0.01, temperature=1.3),
}


@pytest.fixture(params=["sorted", "flashinfer"])
def most_likely(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MostLikely:
    if request.param == "sorted":
        return SortedMostLikely()
    flashinfer_standin.install(monkeypatch)
    found = most_likely_by_flashinfer()
    assert isinstance(found, FlashInferMostLikely)
    return found


def make_draws(kinds: Sequence[SamplingParams], seed: int = 0) -> list[Draw]:
    uniforms = np.random.default_rng(seed).random(len(kinds))
    return [Draw(kind, None if kind.greedy else float(uniform)) for kind, uniform in zip(kinds, uniforms, strict=True)]


def choose(most_likely: MostLikely, logits: torch.Tensor, draws: Sequence[Draw]) -> Chosen:
    tables = DrawTables.build(draws)
    return DeviceChooser(most_likely).choose(logits, tables, [torch.from_numpy(array) for array in tables.arrays])


def on_host(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    tokens = []
    for row, each in zip(logits.numpy(), draws, strict=True):
        best = int(row.argmax())
        tokens.append(best if each.uniform is None else draw(row, best, each.params, each.uniform))
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_would_take_the_same(kind: str, most_likely: MostLikely) -> None:
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    draws = make_draws([KINDS[kind]] * ROWS)
    before = logits.clone()
    chosen = choose(most_likely, logits, draws)
    assert chosen.tokens.tolist() == on_host(logits, draws)
    assert set(chosen.verdicts.tolist()) == {Verdict.SURE}
    assert torch.equal(logits, before)


@pytest.mark.parametrize("seed", range(5))
def test_equal_logits_are_told_apart_as_on_the_host(seed: int, most_likely: MostLikely) -> None:
    """Many equal ones, also where a filter cuts."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, 4, (len(KINDS), VOCAB), generator=random).float()
    kinds = [k for k in KINDS.values() if k.top_k or k.greedy or (k.top_p, k.min_p) == (1.0, 0.0)]
    draws = make_draws(kinds, seed)
    logits = logits[: len(kinds)]
    chosen = choose(most_likely, logits, draws)
    assert chosen.tokens.tolist() == on_host(logits, draws)
    assert set(chosen.verdicts.tolist()) == {Verdict.SURE}


def test_a_row_does_not_see_its_neighbours(most_likely: MostLikely, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, among all kinds, in another order, and worked on a few rows at a time."""
    kinds = list(KINDS.values()) * 3
    logits = torch.randn(len(kinds), VOCAB, generator=torch.Generator().manual_seed(2)) * 4
    draws = make_draws(kinds, seed=7)
    together = choose(most_likely, logits, draws).tokens.tolist()
    assert together == on_host(logits, draws)
    assert together == [int(choose(most_likely, logits[i : i + 1], draws[i : i + 1]).tokens[0]) for i in range(33)]
    assert together[::-1] == choose(most_likely, logits.flip(0), draws[::-1]).tokens.tolist()
    monkeypatch.setattr("engine.sampling.on_device._AT_ONCE", 4 * VOCAB)
    assert together == choose(most_likely, logits, draws).tokens.tolist()


def test_a_flat_row_is_left_to_the_host(most_likely: MostLikely) -> None:
    """Where the short list is not all that the filters leave; the row is kept, whatever becomes of the logits."""
    flat, steep = torch.zeros(VOCAB), torch.linspace(60, 0, VOCAB)
    flat += torch.rand(VOCAB, generator=torch.Generator().manual_seed(3)) * 0.1
    logits = torch.stack((flat, steep, flat, steep, flat))
    kinds = ("top_p", "top_p", "min_p", "min_p", "top_k")
    draws = make_draws([KINDS[kind] for kind in kinds])
    chosen = choose(most_likely, logits, draws)
    sure, look = Verdict.SURE, Verdict.LOOK
    assert chosen.verdicts.tolist() == [look, sure, look, sure, sure]
    expected = on_host(logits, draws)
    logits.zero_()
    assert set(chosen.rows) == {0, 1, 2, 3}
    assert torch.equal(chosen.rows[0], flat)
    assert torch.equal(chosen.rows[3], steep)
    assert [token for token, v in zip(chosen.tokens.tolist(), chosen.verdicts, strict=True) if v == sure] == [
        token for token, v in zip(expected, chosen.verdicts, strict=True) if v == sure
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_what_is_not_finite_is_said_so(bad: str, kind: str, most_likely: MostLikely) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4)) * 4
    good = logits.clone()
    logits[1, 17 : 18 if bad != "-inf" else None] = float(bad)
    logits[1, : 17 if bad == "-inf" else 0] = float(bad)
    draws = make_draws([KINDS[kind]] * 3)
    chosen = choose(most_likely, logits, draws)
    assert chosen.verdicts.tolist() == [Verdict.SURE, Verdict.NOT_FINITE, Verdict.SURE]
    assert 0 <= int(chosen.tokens[1]) < VOCAB
    assert chosen.tokens[[0, 2]].tolist() == [on_host(good, draws)[row] for row in (0, 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_chance_is_never_taken(kind: str, most_likely: MostLikely) -> None:
    """All but three logits are -inf, and the random number is the largest there is."""
    logits = torch.full((2, VOCAB), float("-inf"))
    logits[:, [5, 99, 2000]] = torch.tensor([1.0, 0.5, 0.7])
    params = KINDS[kind]
    uniforms = (None, None) if params.greedy else (0.0, 1.0 - 2.0**-53)
    draws = [Draw(params, uniform) for uniform in uniforms]
    chosen = choose(most_likely, logits, draws)
    assert chosen.tokens.tolist() == on_host(logits, draws)
    assert set(chosen.tokens.tolist()) <= {5, 99, 2000}


def test_small_vocabularies_are_their_own_short_list(most_likely: MostLikely) -> None:
    logits = torch.rand(len(KINDS), 50, generator=torch.Generator().manual_seed(5))
    draws = make_draws(list(KINDS.values()))
    chosen = choose(most_likely, logits, draws)
    assert chosen.tokens.tolist() == on_host(logits, draws)
    assert set(chosen.verdicts.tolist()) == {Verdict.SURE}


@pytest.mark.parametrize(
    ("params", "can"),
    [
        (SamplingParams(), True),
        (SamplingParams(temperature=0.0), True),
        (SamplingParams(top_k=SHORTLIST), True),
        (SamplingParams(top_k=SHORTLIST + 1), False),
        (SamplingParams(logprobs=0), False),
        (SamplingParams(repetition_penalty=1.1), False),
        (SamplingParams(presence_penalty=0.1), False),
        (SamplingParams(logit_bias=((3, 1.0),)), False),
        (SamplingParams(min_tokens=2), False),
    ],
)
def test_what_the_device_can_draw(params: SamplingParams, can: bool) -> None:
    state = SamplingState(params, frozenset({0}), np.arange(3, dtype=np.int32))
    assert (state.draw(0) is not None) == can


def test_numbers_stay_those_of_their_tokens() -> None:
    """However far ahead they are asked for, and how often; the device and the host may take turns."""
    params = SamplingParams(seed=11)
    plain = SamplingState(params, frozenset(), np.arange(3, dtype=np.int32))
    ahead = SamplingState(params, frozenset(), np.arange(3, dtype=np.int32))
    expected = []
    for _ in range(6):
        expected.append(plain.uniform())
        plain.advance(1)
    found = [ahead.uniform(1), ahead.uniform(), ahead.uniform(1)]
    ahead.advance(1)
    found += [ahead.uniform(), ahead.uniform(2)]
    assert found == [expected[1], expected[0], expected[1], expected[1], expected[3]]
    for number in expected[1:]:
        assert ahead.uniform() == number
        ahead.advance(1)
