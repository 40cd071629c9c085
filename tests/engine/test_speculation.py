"""Speculation changes how many steps a text takes, and nothing else: whatever is guessed, and whatever happens."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from engine.api import Delta, Finished, GenerateRequest, Grammar, SamplingParams
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.loading import load_engine
from engine.local import LocalEngine
from tests.engine.conftest import StartEngine
from tests.engine.drafters import Knowing, mixed, right, use, wrong
from tests.engine.test_choices import choose
from tests.engine.test_local_engine import assert_no_page_in_use
from tests.engine.test_sampling_engine import SEEDED, ask
from tests.support.generation import Output, generate
from tests.support.tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

_names = itertools.count()
LONG = {"max_tokens": 40, "min_tokens": 40, "ignore_eos": True}


def prompt(length: int, seed: int = 0) -> np.ndarray:
    """With a stretch that comes twice, so that something can be looked up."""
    tokens = np.random.default_rng(seed).integers(3, 250, length).astype(np.int32)
    tokens[length // 2 : length // 2 + length // 4] = tokens[: length // 4]
    return tokens


def timings(output: Output) -> tuple[int, int]:
    """Drafted and accepted."""
    assert isinstance(output.end, Finished)
    return output.end.timings.drafted_tokens, output.end.timings.accepted_tokens


@pytest.fixture
async def plain(start_engine: StartEngine) -> LocalEngine:
    return start_engine()


async def known(plain: LocalEngine, drafter: Knowing, prompts: list[np.ndarray], **params: Any) -> list[list[int]]:
    """What the engine without speculation gives, which the drafter knows from now on."""
    expected = []
    for tokens in prompts:
        output = await generate(plain, tokens, **params)
        drafter.knows(tokens, output.ids)
        expected.append(output.ids)
    return expected


OPTIONS: list[dict[str, Any]] = [
    {"page_size": 1, "speculative_tokens": 16},
    {"page_size": 4, "max_batched_tokens": 16, "speculative_tokens": 12},
    {"page_size": 16, "speculative_tokens": 7},
    {"page_size": 4, "prefix_cache": False},
    {"page_size": 1, "max_running": 2, "speculative_tokens": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("drafter", ["ngram", "mixed"])
async def test_greedy_texts_are_the_same(
    start_engine: StartEngine,
    plain: LocalEngine,
    drafter: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = [prompt(length, seed=length) for length in (2, 9, 31, 48, 64, 90)]
    knowing = Knowing(mixed(seed=1))
    params = dict(LONG)
    if drafter == "mixed":
        use(knowing, monkeypatch)
    else:  # texts of four tokens, in which n-grams come again
        params["logit_bias"] = tuple((token, 100.0) for token in range(40, 44))
    expected = await known(plain, knowing, prompts, **params)
    engine = start_engine(speculation="ngram", **options)
    alone = [await generate(engine, tokens, **params) for tokens in prompts[:3]]
    beside = await asyncio.gather(*(generate(engine, tokens, **params) for tokens in prompts))
    assert [output.ids for output in alone] == expected[:3]
    assert [output.ids for output in beside] == expected
    drafted, accepted = map(sum, zip(*map(timings, [*alone, *beside]), strict=True))
    assert 0 < accepted < drafted
    assert_no_page_in_use(engine)
    engine._cache.check()


@pytest.mark.parametrize("params", SEEDED, ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
async def test_a_seed_gives_the_same_text_with_and_without(
    start_engine: StartEngine,
    plain: LocalEngine,
    params: SamplingParams,
    page_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    knowing = Knowing(mixed(seed=2))
    use(knowing, monkeypatch)
    engine = start_engine(speculation="ngram", page_size=page_size)
    for seed in range(4):
        tokens = prompt(30, seed)
        expected = await ask(plain, tokens, params)
        knowing.knows(tokens, expected.ids)
        got = await ask(engine, tokens, params)
        assert (got.ids, got.text) == (expected.ids, expected.text)
        assert [told.sampled.id for told in got.logprobs] == [told.sampled.id for told in expected.logprobs]
        assert isinstance(got.end, Finished)
        assert 0 < got.end.timings.accepted_tokens < got.end.timings.drafted_tokens


@pytest.mark.on_a_card
async def test_a_grammar_is_followed_position_by_position(
    start_engine: StartEngine, plain: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    knowing = Knowing(mixed(seed=3))
    use(knowing, monkeypatch)
    engine = start_engine(speculation="ngram")
    schema = {"type": "object", "properties": {"tag": {"enum": ["abcabc", "yyyy"]}, "n": {"type": "boolean"}}}
    grammar = Grammar("json_schema", json.dumps(schema | {"required": ["tag", "n"], "additionalProperties": False}))
    kept = 0
    for seed in range(6):
        params = SamplingParams(seed=seed, max_tokens=200, grammar=grammar)
        expected = await ask(plain, prompt(25), params)
        knowing.knows(prompt(25), expected.ids)
        got = await ask(engine, prompt(25), params)
        assert got.ids == expected.ids
        assert set(json.loads(got.text)) == {"tag", "n"}
        assert isinstance(got.end, Finished)
        kept += got.end.timings.accepted_tokens
    assert kept > 0


@pytest.mark.parametrize("name", ["right", "wrong"])
async def test_right_guesses_save_steps_and_wrong_ones_are_given_up(
    start_engine: StartEngine, plain: LocalEngine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    knowing = Knowing({"right": right, "wrong": wrong}[name])
    [expected] = await known(plain, knowing, [prompt(30)], **LONG)
    use(knowing, monkeypatch)
    engine = start_engine(speculation="ngram", speculative_tokens=4)
    output = await generate(engine, prompt(30), **LONG)
    assert output.ids == expected
    drafted, accepted = timings(output)
    # A step gives a token and its kept drafts; the first token comes with the prompt.
    assert engine.snapshot().steps == 40 - accepted
    if name == "right":
        assert accepted == drafted >= 27
    else:
        assert accepted == 0
        assert drafted <= 14
    assert set(knowing.dropped) == {0}


@pytest.mark.on_a_card
async def test_max_tokens_within_the_drafts(
    start_engine: StartEngine, plain: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    knowing = Knowing(right)
    [expected] = await known(plain, knowing, [prompt(30)], **LONG)
    use(knowing, monkeypatch)
    engine = start_engine(speculation="ngram", speculative_tokens=6, page_size=1)
    for count in range(14):
        output = await generate(engine, prompt(30), max_tokens=count, ignore_eos=True)
        assert isinstance(output.end, Finished)
        assert (output.ids, output.end.reason) == (expected[:count], "length")
        assert output.end.usage.completion_tokens == count
        assert timings(output)[0] <= max(0, count - 2)


@pytest.mark.on_a_card
async def test_ends_within_the_drafts(
    start_engine: StartEngine, plain: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eos id, a stop id and a stop string end the text where they do without drafts; nothing behind them is kept."""
    knowing = Knowing(right)
    await known(plain, knowing, [prompt(30)], **LONG)
    use(knowing, monkeypatch)
    whole = await generate(plain, prompt(30), **LONG)
    engine = start_engine(speculation="ngram", speculative_tokens=6, page_size=1)
    [eos, *_] = sorted(engine.codec.eos_ids)
    ends: list[dict[str, Any]] = [{"stop_token_ids": (whole.ids[at],)} for at in range(3, 20, 4)]
    ends += [{"stop": (whole.text[at : at + length],)} for at, length in ((5, 1), (9, 3), (14, 7))]
    ends += [{"logit_bias": ((eos, 100.0),), "min_tokens": least, "ignore_eos": False} for least in (4, 11)]
    kept = 0
    for end in ends:
        params = {"max_tokens": 40, "ignore_eos": True, **end}
        expected = await generate(plain, prompt(30), **params)
        knowing.texts.clear()
        knowing.knows(prompt(30), [*expected.ids, *whole.ids])
        got = await generate(engine, prompt(30), **params)
        assert isinstance(got.end, Finished)
        assert isinstance(expected.end, Finished)
        assert (got.ids, got.text, got.end.reason) == (expected.ids, expected.text, "stop")
        assert got.end.usage.completion_tokens == expected.end.usage.completion_tokens
        kept += timings(got)[1]
    assert kept > len(ends)
    assert_no_page_in_use(engine)


@pytest.mark.every_attention
@pytest.mark.parametrize("page_size", [1, 4, 16])
async def test_pages_behind_drafts_hold_what_belongs_there(
    start_engine: StartEngine, plain: LocalEngine, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversations that hit what speculation has left in the cache get the answers of a cold engine."""
    knowing = Knowing(mixed(seed=4))
    use(knowing, monkeypatch)
    engine = start_engine(speculation="ngram", page_size=page_size, speculative_tokens=8)
    history = prompt(20)
    for turn in range(4):
        cold = await generate(plain, history, use_cache=False, **LONG)
        knowing.knows(history, cold.ids)
        warm = await generate(engine, history, **LONG)
        assert warm.ids == cold.ids
        # All but the last sampled token has been computed, as without drafts.
        reached = len(history) - 5 - 1 if turn else 0
        assert warm.cached == reached - reached % page_size
        history = np.concatenate((history, np.asarray(cold.ids, np.int32), prompt(5, seed=turn)))
        engine._cache.check()


@pytest.mark.on_a_card
async def test_preempted_texts_are_the_same(
    start_engine: StartEngine, plain: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    knowing = Knowing(mixed(seed=5))
    prompts = [prompt(30, seed) for seed in range(4)]
    expected = await known(plain, knowing, prompts, **LONG)
    use(knowing, monkeypatch)
    tight = start_engine(speculation="ngram", speculative_tokens=16, pool_tokens=160, page_size=4)
    outputs = await asyncio.gather(*(generate(tight, tokens, **LONG) for tokens in prompts))
    assert tight.snapshot().preemptions > 0
    assert sum(timings(output)[1] for output in outputs) > 0
    assert [output.ids for output in outputs] == expected
    assert_no_page_in_use(tight)
    tight._cache.check()


@pytest.mark.on_a_card
async def test_a_full_pool_ends_the_text_at_the_same_token(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"pool_tokens": 64, "page_size": 4}
    knowing = Knowing(right)
    expected = await generate(start_engine(**options), prompt(40), ignore_eos=True)
    knowing.knows(prompt(40), [*expected.ids, 7, 7, 7, 7])
    use(knowing, monkeypatch)
    engine = start_engine(speculation="ngram", **options)
    output = await generate(engine, prompt(40), ignore_eos=True)
    assert output.ids == expected.ids
    assert isinstance(output.end, Finished)
    assert (output.end.reason, output.end.usage.total_tokens) == ("length", 64)
    assert timings(output)[1] > 0
    assert_no_page_in_use(engine)


@pytest.mark.on_a_card
async def test_choices_are_the_same(
    start_engine: StartEngine, plain: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    knowing = Knowing(mixed(seed=6))
    expected = await choose(plain, prompt(30), 3, seed=1, **LONG)
    for ids in expected.ids.values():
        knowing.knows(prompt(30), ids)
    use(knowing, monkeypatch)
    for page_size in (1, 16):
        engine = start_engine(speculation="ngram", speculative_tokens=9, page_size=page_size)
        got = await choose(engine, prompt(30), 3, seed=1, **LONG)
        assert got.ids == expected.ids
        assert 0 < got.end.timings.accepted_tokens < got.end.timings.drafted_tokens
        assert_no_page_in_use(engine)
        engine._cache.check()


@pytest.mark.on_a_card
async def test_aborts_lose_no_page_and_no_index(start_engine: StartEngine) -> None:
    engine = start_engine(
        speculation="ngram", speculative_tokens=16, page_size=1, max_batched_tokens=32, pool_tokens=400
    )
    chance = random.Random(7)

    async def one(number: int) -> None:
        moment, seen = chance.randint(1, 12), 0
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        request = GenerateRequest(f"a{next(_names)}", prompt(40, seed=number % 4), params)
        async for _ in engine.submit(request):
            seen += 1
            if seen == moment:
                engine.abort(request.id)

    await asyncio.gather(*(one(number) for number in range(40)))
    assert_no_page_in_use(engine)
    engine._cache.check()
    assert await engine.flush()
    assert engine.snapshot().pages.free == engine.info.num_pages
    assert engine._stepper._speculator._paces == {}
    assert engine._stepper._speculator._drafter._indices == {}  # type: ignore[union-attr]


async def test_a_drafter_that_fails_is_given_up(
    start_engine: StartEngine, plain: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(follows: list[int]) -> list[int]:
        raise RuntimeError("no guess")

    knowing = Knowing(broken)
    [expected] = await known(plain, knowing, [prompt(30)], **LONG)
    use(knowing, monkeypatch)
    engine = start_engine(speculation="ngram")
    for _ in range(2):
        output = await generate(engine, prompt(30), **LONG)
        assert (output.ids, timings(output)) == (expected, (0, 0))
    assert len(knowing.asks) == 1


async def test_a_sliding_window_sees_no_draft(
    tmp_path: Path, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path / "windowed", "mistral", sliding_window=12)
    options = {"model": str(tmp_path / "windowed"), "page_size": 4}
    knowing = Knowing(mixed(seed=8))
    expected = await known(start_engine(**options), knowing, [prompt(30), prompt(9)], **LONG)
    use(knowing, monkeypatch)
    engine = start_engine(speculation="ngram", **options)
    for tokens, ids in zip([prompt(30), prompt(9)], expected, strict=True):
        output = await generate(engine, tokens, **LONG)
        assert output.ids == ids
        assert timings(output)[1] > 0


@pytest.mark.every_attention
async def test_the_model_as_its_own_draft_is_always_right(
    tiny: tuple[Path, PreTrainedModel], start_engine: StartEngine, plain: LocalEngine
) -> None:
    engine = start_engine(
        speculation="draft", draft_model=str(tiny[0]), speculative_tokens=11, max_batched_tokens=16, page_size=4
    )
    prompts = [prompt(30, seed=seed) for seed in range(4)]
    expected = [(await generate(plain, tokens, **LONG)).ids for tokens in prompts]
    alone = await generate(engine, prompts[0], **LONG)
    assert alone.ids == expected[0]
    drafted, accepted = timings(alone)
    assert drafted == accepted > 20
    beside = await asyncio.gather(*(generate(engine, tokens, **LONG) for tokens in prompts))
    assert [output.ids for output in beside] == expected
    assert all(timings(output)[0] == timings(output)[1] > 0 for output in beside)
    assert engine._stepper._speculator._drafter._followed == {}  # type: ignore[union-attr]


async def test_another_draft_model_changes_nothing(
    tmp_path: Path, start_engine: StartEngine, plain: LocalEngine
) -> None:
    """Its context is shorter than the text as well: behind that it guesses nothing."""
    save_tiny(tmp_path / "draft", "llama", seed=5, num_hidden_layers=1, max_position_embeddings=50)
    engine = start_engine(
        speculation="draft", draft_model=str(tmp_path / "draft"), speculative_tokens=9, pool_tokens=200, page_size=4
    )
    prompts = [prompt(30, seed=seed) for seed in range(4)]
    expected = [(await generate(plain, tokens, **LONG)).ids for tokens in prompts]
    outputs = await asyncio.gather(*(generate(engine, tokens, **LONG) for tokens in prompts))
    assert [output.ids for output in outputs] == expected
    assert sum(timings(output)[0] for output in outputs) > 0
    assert_no_page_in_use(engine)


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path, tiny: tuple[Path, PreTrainedModel]) -> None:
    save_tiny(tmp_path / "draft", "llama")
    tokenizer = json.loads((tmp_path / "draft" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "draft" / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = EngineConfig(
        model=str(tiny[0]),
        models_dir=tmp_path,
        dtype="float32",
        speculation="draft",
        draft_model=str(tmp_path / "draft"),
    )
    with pytest.raises(ModelError, match="another vocabulary"):
        load_engine(config)


@pytest.mark.parametrize(
    "options",
    [
        {"speculation": "draft"},
        {"speculation": "off", "draft_model": "x"},
        {"speculation": "ngram", "draft_model": "x"},
        {"speculation": "ngram", "speculative_tokens": 0},
    ],
    ids=str,
)
def test_options_that_do_not_agree_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"needs one|uses no draft model|at least 1"):
        EngineConfig(models_dir=Path(), **options)


async def test_deltas_come_in_order(
    start_engine: StartEngine, plain: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    knowing = Knowing(right)
    [expected] = await known(plain, knowing, [prompt(30)], **LONG)
    use(knowing, monkeypatch)
    engine = start_engine(speculation="ngram")
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    deltas = [e async for e in engine.submit(GenerateRequest("d", prompt(30), params)) if isinstance(e, Delta)]
    assert [token for delta in deltas for token in delta.ids] == expected
    assert [delta.reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].reason == "length"
