"""Sampling parameters through a running engine: neighbours, the cache and preemption change nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from engine.api import Delta, Failed, Finished, GenerateRequest, Grammar, SampledLogprob, SamplingParams
from engine.local import LocalEngine
from tests.engine.conftest import StartEngine

pytestmark = pytest.mark.on_a_card

_numbers = itertools.count()


@dataclass(slots=True)
class Text:
    """What one request gave."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[SampledLogprob] = field(default_factory=list)
    end: Finished | Failed | None = None


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 250, length).astype(np.int32)


async def ask(engine: LocalEngine, tokens: np.ndarray, params: SamplingParams, *, use_cache: bool = True) -> Text:
    request = GenerateRequest(f"r{next(_numbers)}", tokens, params, use_cache=use_cache)
    got = Text()
    async for event in engine.submit(request):
        if isinstance(event, Delta):
            assert len(event.logprobs) == (0 if params.logprobs is None else len(event.ids))
            got.ids += event.ids
            got.text += event.text
            got.logprobs += event.logprobs
        elif isinstance(event, Finished | Failed):
            got.end = event
    return got


SEEDED = [
    SamplingParams(seed=11, max_tokens=24, min_tokens=24),
    SamplingParams(seed=12, max_tokens=24, ignore_eos=True, temperature=0.8, top_p=0.9, top_k=30, min_p=0.01),
    SamplingParams(
        seed=13,
        max_tokens=24,
        ignore_eos=True,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias=((40, 2.0),),
    ),
    SamplingParams(
        temperature=0.0, max_tokens=24, ignore_eos=True, repetition_penalty=1.5, frequency_penalty=0.7, logprobs=2
    ),
]
NEIGHBOUR = SamplingParams(max_tokens=24, min_tokens=24)
"""Unseeded, so never the same twice."""


@pytest.mark.parametrize("params", SEEDED, ids=str)
async def test_a_text_is_the_same_alone_and_beside_others(start_engine: StartEngine, params: SamplingParams) -> None:
    engine = start_engine(max_running=8)
    tokens = prompt(30)
    alone = await ask(engine, tokens, params)
    assert len(alone.ids) == 24
    for batch, place in ((3, 0), (3, 2), (8, 0), (8, 4), (8, 7)):
        asked = [ask(engine, prompt(20 + i, seed=100 + i), NEIGHBOUR) for i in range(batch)]
        asked[place].close()
        asked[place] = ask(engine, tokens, params)
        assert (await asyncio.gather(*asked))[place].ids == alone.ids


@pytest.mark.parametrize("params", SEEDED, ids=str)
async def test_cold_cached_uncached_and_preempted_are_the_same(
    start_engine: StartEngine, params: SamplingParams
) -> None:
    roomy, tight = start_engine(), start_engine(pool_tokens=160, page_size=4)
    tokens = prompt(40)
    cold = await ask(roomy, tokens, params)
    cached = await ask(roomy, tokens, params)
    uncached = await ask(roomy, tokens, params, use_cache=False)
    others = [ask(tight, prompt(38, seed=i), NEIGHBOUR) for i in range(3)]
    *_, preempted = await asyncio.gather(*others, ask(tight, tokens, params))
    assert tight.snapshot().preemptions > 0
    assert cold.ids == cached.ids == uncached.ids == preempted.ids


async def test_the_repetition_penalty_knows_the_prompt_and_the_others_do_not(start_engine: StartEngine) -> None:
    engine = start_engine()
    base = SamplingParams(temperature=0.0, max_tokens=1, min_tokens=1)
    for seed in range(50):
        tokens = prompt(60, seed)
        [plain] = (await ask(engine, tokens, base)).ids
        if plain in tokens:
            break
    assert plain in tokens
    for penalty, same in (("presence_penalty", True), ("frequency_penalty", True), ("repetition_penalty", False)):
        got = await ask(engine, tokens, replace(base, **{penalty: 2.0}))  # type: ignore[arg-type]
        assert (got.ids == [plain]) is same, penalty


@pytest.mark.parametrize("top", [0, 4, 20])
async def test_one_logprob_for_each_id(start_engine: StartEngine, top: int) -> None:
    engine = start_engine()
    got = await ask(engine, prompt(30), SamplingParams(seed=3, max_tokens=20, logprobs=top))
    assert [told.sampled.id for told in got.logprobs] == got.ids
    assert [len(told.top) for told in got.logprobs] == [top] * len(got.ids)
    for told in got.logprobs:
        ranked = [entry.logprob for entry in told.top]
        assert ranked == sorted(ranked, reverse=True)
    assert b"".join(told.sampled.bytes for told in got.logprobs).decode() == got.text


async def test_a_schema_is_followed_beside_other_requests(start_engine: StartEngine) -> None:
    engine = start_engine(max_running=8)
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}, "tag": {"enum": ["x", "yy"]}}}
    schema |= {"required": ["ok", "tag"], "additionalProperties": False}
    grammar = Grammar("json_schema", json.dumps(schema))
    masked = [SamplingParams(seed=i, max_tokens=300, grammar=grammar, ignore_eos=i == 1) for i in range(3)]
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    alone = await ask(engine, prompt(30), greedy)
    beside, *texts = await asyncio.gather(
        ask(engine, prompt(30), greedy), *(ask(engine, prompt(25, seed=i), p) for i, p in enumerate(masked))
    )
    assert beside.ids == alone.ids
    for got in texts:
        assert isinstance(got.end, Finished)
        assert got.end.reason == "stop"
        assert got.ids[-1] in engine.codec.eos_ids
        value = json.loads(got.text)
        assert set(value) == {"ok", "tag"}
        assert value["ok"] in (True, False)
        assert value["tag"] in ("x", "yy")


async def test_max_tokens_bounds_a_grammar(start_engine: StartEngine) -> None:
    engine = start_engine()
    params = SamplingParams(seed=1, max_tokens=5, grammar=Grammar("regex", "[a-z]{50}"))
    got = await ask(engine, prompt(20), params)
    assert isinstance(got.end, Finished)
    assert (got.end.reason, len(got.text)) == ("length", 5)


async def test_a_row_without_a_candidate_fails_alone(start_engine: StartEngine) -> None:
    engine = start_engine()
    every_id = tuple(range(engine.codec.vocab_size))
    hopeless = SamplingParams(max_tokens=5, min_tokens=5, stop_token_ids=every_id)
    broken, well = await asyncio.gather(
        ask(engine, prompt(20), hopeless), ask(engine, prompt(20), SamplingParams(max_tokens=5, min_tokens=5))
    )
    assert isinstance(broken.end, Failed)
    assert broken.end.code == "no_candidate"
    assert len(well.ids) == 5
