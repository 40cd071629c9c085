"""n > 1: choices of one prompt that is computed once, each with its own text and end; and storms of aborts."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest

from engine.api import (
    Admitted,
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    Progress,
    Queued,
    SamplingParams,
)
from engine.choices import choice_params
from engine.errors import InvalidRequest, QueueFull
from engine.local import LocalEngine
from engine.sampling import NoCandidate, Sampled, Sampler, SamplingState
from tests.engine.conftest import StartEngine
from tests.engine.test_local_engine import assert_no_page_in_use, prompt
from tests.support.generation import generate

pytestmark = pytest.mark.on_a_card

_numbers = itertools.count()


@dataclass
class Outputs:
    """What the choices of one request gave, by index."""

    ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    text: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    @property
    def end(self) -> Finished:
        assert isinstance(self.events[-1], Finished)
        return self.events[-1]

    def add(self, event: Event) -> None:
        assert not (self.events and isinstance(self.events[-1], Finished | Failed))
        self.events.append(event)
        if isinstance(event, Delta):
            assert event.index not in self.reasons, "nothing follows a choice's last delta"
            self.ids[event.index] += event.ids
            self.text[event.index] += event.text
            if event.reason is not None:
                self.reasons[event.index] = event.reason

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)


async def choose(
    engine: LocalEngine, tokens: np.ndarray, n: int, *, use_cache: bool = True, **params: object
) -> Outputs:
    sampling = SamplingParams(**{"temperature": 1.0, **params})  # type: ignore[arg-type]
    outputs = Outputs()
    request = GenerateRequest(f"n-{next(_numbers)}", tokens, sampling, n=n, use_cache=use_cache)
    async for event in engine.submit(request):
        outputs.add(event)
    return outputs


LONG = {"max_tokens": 24, "min_tokens": 24, "ignore_eos": True}


@pytest.mark.every_attention
@pytest.mark.parametrize(("length", "page_size"), [(1, 16), (15, 16), (16, 16), (17, 16), (40, 16), (1, 1), (17, 1)])
async def test_each_choice_is_what_its_seed_gives_alone(start_engine: StartEngine, length: int, page_size: int) -> None:
    engine = start_engine(page_size=page_size)
    together = await choose(engine, prompt(length), 4, seed=7, **LONG)
    for index in range(4):
        seed = choice_params(SamplingParams(seed=7), index).seed
        alone = await generate(engine, prompt(length), seed=seed, temperature=1.0, use_cache=False, **LONG)
        assert (together.ids[index], together.text[index]) == (alone.ids, alone.text)
    assert len({tuple(ids) for ids in together.ids.values()}) == 4
    assert together.reasons == dict.fromkeys(range(4), "length")
    assert_no_page_in_use(engine)


def test_seeds_follow_from_the_requests() -> None:
    params = SamplingParams(seed=5)
    seeds = [choice_params(params, index).seed for index in range(16)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 16
    assert seeds == [choice_params(params, index).seed for index in range(16)]
    assert choice_params(SamplingParams(), 3).seed is None


async def test_the_prompt_is_computed_once_and_counted_once(start_engine: StartEngine) -> None:
    engine = start_engine(max_batched_tokens=16)
    outputs = await choose(engine, prompt(50), 4, seed=1, **LONG)
    usage = outputs.end.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (50, 0, 4 * 24)
    assert [type(event) for event in outputs.events[:5]] == [Queued, Admitted, Progress, Progress, Progress]
    assert (outputs.count(Queued), outputs.count(Admitted), outputs.count(Progress)) == (1, 1, 3)
    assert outputs.count(Finished) == 1
    # 4 steps for the chunks of the prompt, one of which samples all first tokens, then one for each other token.
    assert engine.snapshot().steps == 4 + 23
    assert outputs.end.timings.decode_ms > 0


async def test_choices_end_on_their_own(start_engine: StartEngine) -> None:
    engine = start_engine()
    common = {"max_tokens": 24, "ignore_eos": True, "seed": 3}
    full = await choose(engine, prompt(20), 4, **common)
    stop = full.text[2][10:12]
    outputs = await choose(engine, prompt(20), 4, stop=(stop,), **common)
    for index, text in full.text.items():
        kept, found, _ = text.partition(stop)
        assert outputs.text[index] == kept
        assert outputs.reasons[index] == ("stop" if found else "length")
    assert outputs.reasons[2] == "stop"
    assert outputs.end.reason == outputs.reasons[0]
    assert outputs.end.usage.completion_tokens >= sum(map(len, outputs.ids.values()))
    assert_no_page_in_use(engine)


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_short_choices(start_engine: StartEngine, max_tokens: int) -> None:
    engine = start_engine()
    outputs = await choose(engine, prompt(20), 3, max_tokens=max_tokens, ignore_eos=True)
    assert outputs.reasons == dict.fromkeys(range(3), "length")
    assert outputs.end.usage.completion_tokens == 3 * max_tokens
    assert_no_page_in_use(engine)


@pytest.mark.every_attention
async def test_choices_beyond_what_runs_wait(start_engine: StartEngine) -> None:
    engine = start_engine(max_running=4)
    roomy = start_engine()
    expected = await choose(roomy, prompt(30), 4, seed=9, **LONG)
    results = await asyncio.gather(*(choose(engine, prompt(30), 4, seed=9, **LONG) for _ in range(3)))
    for outputs in results:
        assert outputs.ids == expected.ids
        assert outputs.count(Admitted) == 1
        assert outputs.end.usage.completion_tokens == 4 * 24
    assert_no_page_in_use(engine)


@pytest.mark.every_attention
async def test_preempted_choices_end_with_the_same_tokens(start_engine: StartEngine) -> None:
    roomy, tight = start_engine(), start_engine(pool_tokens=160, page_size=4)
    common = {"max_tokens": 50, "min_tokens": 50, "ignore_eos": True, "seed": 4}
    expected = await choose(roomy, prompt(30), 4, **common)
    outputs = await choose(tight, prompt(30), 4, **common)
    assert tight.snapshot().preemptions > 0
    assert outputs.end.timings.preemptions > 0
    assert outputs.ids == expected.ids
    assert_no_page_in_use(tight)


@pytest.mark.parametrize("options", [{"prefix_cache": False}, {}])
async def test_without_the_cache(start_engine: StartEngine, options: dict[str, bool]) -> None:
    engine = start_engine(**options)
    cached = await choose(start_engine(), prompt(30), 3, seed=2, **LONG)
    outputs = await choose(engine, prompt(30), 3, seed=2, use_cache=bool(options), **LONG)
    assert outputs.ids == cached.ids
    assert engine.snapshot().pages.evictable == 0


async def test_a_full_pool_ends_the_last_choice_by_length(start_engine: StartEngine) -> None:
    engine = start_engine(pool_tokens=64, page_size=4)
    outputs = await choose(engine, prompt(40), 2, ignore_eos=True)
    assert outputs.reasons == {0: "length", 1: "length"}
    assert [len(outputs.ids[index]) for index in range(2)] == [24, 24]
    assert_no_page_in_use(engine)


@pytest.mark.parametrize("n", [0, -1, 5])
async def test_a_number_that_cannot_run_is_refused(start_engine: StartEngine, n: int) -> None:
    engine = start_engine(max_running=4)
    with pytest.raises(InvalidRequest, match="between 1 and 4"):
        engine.submit(GenerateRequest("x", prompt(3), n=n))
    assert (await generate(engine, prompt(5), max_tokens=1)).ids


async def test_the_queue_counts_requests(start_engine: StartEngine) -> None:
    engine = start_engine(max_running=4, max_waiting=2)
    params = SamplingParams(ignore_eos=True)
    streams = [engine.submit(GenerateRequest("r0", prompt(5), params, n=4))]
    async for event in streams[0]:
        if isinstance(event, Delta):
            break
    streams += [engine.submit(GenerateRequest(f"r{i}", prompt(5), params, n=4)) for i in (1, 2)]
    assert engine.snapshot().waiting == 2
    with pytest.raises(QueueFull):
        engine.submit(GenerateRequest("r3", prompt(5), params))
    for i, stream in enumerate(streams):
        engine.abort(f"r{i}")
        assert isinstance([event async for event in stream][-1], Finished)


async def test_an_abort_ends_all_choices(start_engine: StartEngine) -> None:
    engine = start_engine()
    outputs = Outputs()
    async for event in engine.submit(GenerateRequest("doomed", prompt(20), SamplingParams(ignore_eos=True), n=4)):
        outputs.add(event)
        if outputs.count(Delta) == 9:
            engine.abort("doomed")
    assert outputs.end.reason == "cancelled"
    assert outputs.reasons == dict.fromkeys(range(4), "cancelled")
    assert_no_page_in_use(engine)


async def test_a_choice_that_fails_fails_its_request_only(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, original = start_engine(), Sampler.choose
    alone = await choose(engine, prompt(30), 2, seed=8, **LONG)
    doomed = itertools.count()

    def broken(self: Sampler, place: int, state: SamplingState) -> Sampled | NoCandidate:
        if state.params.min_p and next(doomed) == 9:  # the second choice of four, in their third step
            return NoCandidate("nothing")
        return original(self, place, state)

    monkeypatch.setattr(Sampler, "choose", broken)
    failed, beside = await asyncio.gather(
        choose(engine, prompt(20), 4, min_p=0.5, **LONG), choose(engine, prompt(30), 2, seed=8, **LONG)
    )
    assert isinstance(failed.events[-1], Failed)
    assert failed.events[-1].code == "no_candidate"
    assert beside.ids == alone.ids
    assert_no_page_in_use(engine)


async def test_a_sampler_that_changes_logits_changes_its_own(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, original = start_engine(), Sampler.choose
    expected = await choose(engine, prompt(20), 3, seed=1, **LONG)

    def spoiling(self: Sampler, place: int, state: SamplingState) -> Sampled | NoCandidate:
        outcome = original(self, place, state)
        self._rows[place].fill(float("nan"))
        return outcome

    monkeypatch.setattr(Sampler, "choose", spoiling)
    assert (await choose(engine, prompt(20), 3, seed=1, **LONG)).ids == expected.ids


async def test_stop_strings_over_tokens_of_the_model(start_engine: StartEngine) -> None:
    engine = start_engine()
    whole = await generate(engine, prompt(30), max_tokens=40, ignore_eos=True)
    for start, length in ((0, 1), (3, 4), (7, 9), (11, 1)):
        stop = whole.text[start : start + length]
        output = await generate(engine, prompt(30), max_tokens=40, ignore_eos=True, stop=(stop, "never there"))
        assert output.text == whole.text[: whole.text.index(stop)]
        assert isinstance(output.end, Finished)
        assert output.end.reason == "stop"
        assert output.ids == whole.ids[: len(output.ids)]
        assert whole.text.startswith(engine.codec.decode(output.ids))


STORM = 200


@pytest.mark.every_attention
@pytest.mark.parametrize("pool_tokens", [None, 256])
async def test_a_storm_of_aborts_loses_no_page(start_engine: StartEngine, pool_tokens: int | None) -> None:
    """Aborts at random moments of a request's life, before and after its end: one terminal event, every page back."""
    engine = start_engine(pool_tokens=pool_tokens, page_size=4, max_batched_tokens=32, max_running=8, max_waiting=1000)
    chance = random.Random(pool_tokens)
    free = asyncio.Semaphore(12)

    async def one(number: int) -> Outputs:
        outputs, moment = Outputs(), chance.randint(0, 14)
        params = SamplingParams(seed=number, max_tokens=chance.randint(0, 20), ignore_eos=True, stop=("QZ", "x"))
        n = chance.choice((1, 1, 2, 4))
        tokens = prompt(chance.randint(1, 60), seed=number % 5)
        request = GenerateRequest(f"s{number}", tokens, params, n=n, use_cache=chance.random() < 0.9)
        async with free:
            stream = engine.submit(request)
            if moment == 0:
                engine.abort(request.id)
            async for event in stream:
                outputs.add(event)
                if len(outputs.events) == moment:
                    engine.abort(request.id)
                    if chance.random() < 0.2:
                        engine.abort(request.id)
        engine.abort(request.id)
        return outputs

    results = await asyncio.gather(*(one(number) for number in range(STORM)))
    reasons = [outputs.end.reason for outputs in results]
    assert {"cancelled", "length"} <= set(reasons)
    assert reasons.count("cancelled") > STORM // 4
    assert_no_page_in_use(engine)
    assert await engine.flush()
    engine._cache.check()
    assert engine.snapshot().pages.free == engine.info.num_pages
    assert (engine.snapshot().running, engine.snapshot().waiting) == (0, 0)
