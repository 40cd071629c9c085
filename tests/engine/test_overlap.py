"""Steps that are launched while the one before still runs: every token, page and end as if they had been one by one."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from engine.api import Delta, Failed, Finished, GenerateRequest, SamplingParams
from engine.attention.flashinfer import FlashInferAttention
from engine.devices import CpuDevice, Device
from engine.errors import EngineBroken
from engine.launched import Launched
from engine.link import StagedLink
from engine.local import LocalEngine
from tests.engine.conftest import StartEngine
from tests.engine.test_local_engine import assert_no_page_in_use, prompt
from tests.engine.two_turns import two_turns
from tests.support.flashinfer_standin.stream import StandinFence
from tests.support.generation import generate
from tests.support.standin_device import StandinDevice, use_standin

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "top_k": 12, "temperature": 1.7},
    {"seed": 3, "top_p": 0.8},
    {"seed": 4, "min_p": 0.1, "top_k": 40, "top_p": 0.95},
]
HOST_ALONE: list[dict[str, Any]] = [{"seed": 5, "repetition_penalty": 1.3}, {"temperature": 0.0, "logprobs": 2}]
OPTIONS: dict[str, Any] = {"context_length": 160, "pool_tokens": 1024, "max_running": 6, "max_batched_tokens": 48}


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> StandinDevice:
    return use_standin(monkeypatch)


def on(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.loading.find_device", lambda wish, attention: device)


def overlapped(engine: LocalEngine) -> int:
    return engine._stepper.overlapped


async def ask_all(engine: LocalEngine, kinds: list[dict[str, Any]], **options: Any) -> list[tuple[Any, ...]]:
    """Prompts of all lengths, which come one after the other while the first ones are being answered."""

    async def ask(index: int, kind: dict[str, Any]) -> tuple[Any, ...]:
        for _ in range(3 * index):
            await asyncio.sleep(0)
        output = await generate(engine, prompt(5 + 9 * index, seed=index), **{"max_tokens": 40, **options, **kind})
        assert isinstance(output.end, Finished)
        return output.ids, output.text, output.end.reason, replace(output.end.usage, cached_tokens=0)

    return await asyncio.gather(*(ask(index, kind) for index, kind in enumerate(kinds)))


CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "to the limit": (KINDS * 2, {"ignore_eos": True}),
    "with ends by eos": (KINDS * 2, {}),
    "with stop ids": (KINDS * 2, {"stop_token_ids": tuple(range(40, 80)), "ignore_eos": True}),
    "beside what the host samples": (KINDS + HOST_ALONE + KINDS, {"ignore_eos": True}),
    "a token each": (KINDS, {"max_tokens": 1}),
    "two tokens each": (KINDS, {"max_tokens": 2, "ignore_eos": True}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("page_size", [1, 16])
async def test_texts_are_the_same(
    case: str, page_size: int, start_engine: StartEngine, standin: StandinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds, options = CASES[case]
    ours = start_engine(page_size=page_size, **OPTIONS)
    on(CpuDevice(), monkeypatch)
    theirs = start_engine(page_size=page_size, speculation="off", **OPTIONS)
    assert await ask_all(ours, kinds, **options) == await ask_all(theirs, kinds, **options)
    assert overlapped(theirs) == 0
    assert overlapped(ours) > 0
    for engine in (ours, theirs):
        assert_no_page_in_use(engine)
        engine._cache.check()


async def test_most_steps_of_a_stream_are_launched_ahead(start_engine: StartEngine, standin: StandinDevice) -> None:
    engine = start_engine(**OPTIONS)
    await generate(engine, prompt(10), max_tokens=50, ignore_eos=True, temperature=0.0)
    assert (engine.snapshot().steps, overlapped(engine)) == (50, 49)


@pytest.mark.parametrize("cascade", [False, True])
async def test_preemption_eviction_and_choices(
    cascade: bool, start_engine: StartEngine, standin: StandinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pool that is too small for all, and a second turn from what is left of the first."""
    texts, histories = [], [prompt(20 + 7 * index, seed=index) for index in range(6)]
    if cascade:
        monkeypatch.setattr("engine.attention.build.FlashInferAttention", partial(FlashInferAttention, least_saved=1))
    for device in (standin, CpuDevice()):
        on(device, monkeypatch)
        options = {**OPTIONS, "pool_tokens": 288, "max_batched_tokens": 24, "speculation": "off"}
        engine = start_engine(page_size=8, **options)
        texts.append(await two_turns(engine, histories, KINDS, max_tokens=30, ignore_eos=True))
        assert engine.snapshot().preemptions > 0
        assert engine.snapshot().counters["evicted_pages"] > 0
        assert_no_page_in_use(engine)
        engine._cache.check()
        assert (overlapped(engine) > 0) == (device is standin)
    assert texts[0] == texts[1]
    assert (standin.standin.calls["shared plan"] > 20) == cascade


async def test_the_host_takes_back_what_the_device_cannot_know(
    start_engine: StartEngine, standin: StandinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a short list of five tokens, many a nucleus is larger: the step behind has then begun with a wrong token."""
    kinds = [{"seed": seed, "top_p": 0.97, "temperature": 1.5} for seed in range(4)] + KINDS
    on(CpuDevice(), monkeypatch)
    expected = await ask_all(start_engine(speculation="off", **OPTIONS), kinds, ignore_eos=True)
    on(standin, monkeypatch)
    monkeypatch.setattr("engine.sampling.on_device.SHORTLIST", 5)
    looks, original = [], Launched.look
    monkeypatch.setattr(Launched, "look", lambda self, place: looks.append(place) or original(self, place))
    engine = start_engine(**OPTIONS)
    assert await ask_all(engine, kinds, ignore_eos=True) == expected
    assert len(looks) > 20
    assert overlapped(engine) > 20
    assert_no_page_in_use(engine)
    engine._cache.check()


@pytest.mark.parametrize("length", [29, 30, 31, 32])
async def test_a_second_turn_finds_all_of_the_first(
    length: int, start_engine: StartEngine, standin: StandinDevice
) -> None:
    """Whatever was still under way when the first one ended, and rightly: its answer is that of a cold cache."""
    engine = start_engine(page_size=4, **OPTIONS)
    first = await generate(engine, prompt(13), max_tokens=length, ignore_eos=True, temperature=0.0)
    history = np.concatenate((prompt(13), np.asarray(first.ids, np.int32), prompt(6, seed=9)))
    warm = await generate(engine, history, max_tokens=20, ignore_eos=True, temperature=0.0)
    cold = await generate(engine, history, max_tokens=20, ignore_eos=True, temperature=0.0, use_cache=False)
    assert isinstance(warm.end, Finished)
    assert warm.end.usage.cached_tokens == (13 + length - 1) // 4 * 4
    assert warm.ids == cold.ids


async def test_an_abort_gives_the_pages_back_within_a_step(start_engine: StartEngine, standin: StandinDevice) -> None:
    """Others are not disturbed by what is still computed of it."""
    engine = start_engine(page_size=4, **OPTIONS)
    alone = await generate(engine, prompt(20, seed=1), max_tokens=60, ignore_eos=True, temperature=0.0)
    await engine.flush()
    other = asyncio.ensure_future(generate(engine, prompt(20, seed=1), max_tokens=60, ignore_eos=True, temperature=0.0))
    for seed in range(5):
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=100)
        ended = None
        async for event in engine.submit(GenerateRequest(f"gone {seed}", prompt(15, seed=20 + seed), params)):
            if isinstance(event, Delta):
                engine.abort(f"gone {seed}")
            ended = event
        assert isinstance(ended, Finished)
        assert ended.reason == "cancelled"
    assert (await other).ids == alone.ids
    assert_no_page_in_use(engine)


@pytest.mark.parametrize("when", ["launch", "wait"])
async def test_a_step_that_fails_while_another_runs(
    when: str, start_engine: StartEngine, standin: StandinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests fail, with one end each; the engine goes on."""
    engine = start_engine(**OPTIONS)
    expected = await generate(engine, prompt(9, seed=3), max_tokens=20, ignore_eos=True, temperature=0.0)
    await engine.flush()
    owner: Any = engine._stepper._runner if when == "launch" else Launched
    original, calls = getattr(owner, when), []

    def failing(*arguments: Any) -> Any:
        calls.append(when)
        if len(calls) == 7:
            raise RuntimeError("boom")
        return original(*arguments)

    monkeypatch.setattr(owner, when, failing)
    ends = await asyncio.gather(
        *(generate(engine, prompt(8, seed=s), max_tokens=30, ignore_eos=True, temperature=0.0) for s in range(3))
    )
    assert [type(output.end) for output in ends] == [Failed] * 3
    again = await generate(engine, prompt(9, seed=3), max_tokens=20, ignore_eos=True, temperature=0.0)
    assert again.ids == expected.ids
    assert_no_page_in_use(engine)
    engine._cache.check()


@pytest.mark.parametrize("when", ["launch", "wait"])
async def test_a_device_that_is_lost_ends_the_engine(
    when: str, start_engine: StartEngine, standin: StandinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests fail, those that wait too, and the engine says that it has ended; want of memory is no such end."""
    engine = start_engine(**{**OPTIONS, "max_running": 2})
    owner, name = (StagedLink, "send") if when == "launch" else (StandinFence, "wait")
    original, errors = getattr(owner, name), ["out of memory", "an illegal memory access was encountered"]

    def failing(*arguments: Any) -> Any:
        if errors and engine._stepper.steps % 4 == 3:
            raise torch.AcceleratorError(f"CUDA error: {errors.pop(0)}")
        return original(*arguments)

    monkeypatch.setattr(owner, name, failing)
    common = {"max_tokens": 30, "ignore_eos": True, "temperature": 0.0}
    starved = await generate(engine, prompt(8), **common)
    assert isinstance(starved.end, Failed)
    assert not engine.snapshot().broken
    outputs = await asyncio.wait_for(
        asyncio.gather(*(generate(engine, prompt(8, seed=s), **common) for s in range(4))), 30
    )
    assert [(type(output.end), output.end.code) for output in outputs] == [(Failed, "engine_error")] * 4
    assert engine.snapshot().broken
    with pytest.raises(EngineBroken):
        await generate(engine, prompt(8), **common)


async def test_a_row_that_is_no_number_fails_alone(
    start_engine: StartEngine, standin: StandinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen on the device, where nobody sees it before the next step is launched."""
    engine = start_engine(max_running=3, context_length=160, pool_tokens=1024, max_batched_tokens=48)
    prompts = [prompt(8, seed=seed) for seed in range(3)]
    alone = [await generate(engine, p, max_tokens=25, ignore_eos=True, temperature=0.0) for p in prompts]
    await engine.flush()
    runner = engine._stepper._runner
    original, calls = runner._chooser.choose, []  # type: ignore[union-attr]

    def poisoned(logits: torch.Tensor, *rest: Any) -> Any:
        calls.append(len(logits))
        if calls.count(3) == 4 and len(logits) == 3:
            logits = logits.clone()
            logits[1] = float("nan")
        return original(logits, *rest)

    monkeypatch.setattr(runner._chooser, "choose", poisoned)
    outputs = await asyncio.gather(
        *(generate(engine, p, max_tokens=25, ignore_eos=True, temperature=0.0) for p in prompts)
    )
    failed = [output.end for output in outputs if isinstance(output.end, Failed)]
    assert [end.code for end in failed] == ["bad_logits"]
    for output, expected in zip(outputs, alone, strict=True):
        assert isinstance(output.end, Failed) or output.ids == expected.ids
    assert_no_page_in_use(engine)


async def test_an_id_that_comes_again_while_its_last_step_still_runs(
    start_engine: StartEngine, standin: StandinDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request of that id has failed, and the step behind computes another token of it."""
    engine = start_engine(**OPTIONS)
    second = GenerateRequest("again", prompt(9, seed=3), SamplingParams(temperature=0.0, max_tokens=20))
    expected = await generate(engine, second.tokens, max_tokens=20)
    await engine.flush()
    runner, came_again = engine._stepper._runner, threading.Event()
    choose, deliver, calls = runner._chooser.choose, engine._deliver, []  # type: ignore[union-attr]

    def poisoned(logits: torch.Tensor, *rest: Any) -> Any:
        calls.append(len(logits))
        return choose(logits * float("nan") if len(calls) == 4 else logits, *rest)

    def wait_for_the_second() -> None:
        failed = any(isinstance(event, Failed) for event in engine._stepper._outbox)
        deliver()
        if failed:
            assert came_again.wait(10)

    monkeypatch.setattr(runner._chooser, "choose", poisoned)
    monkeypatch.setattr(engine, "_deliver", wait_for_the_second)
    events = [event async for event in engine.submit(replace(second, tokens=prompt(8, seed=1)))]
    assert isinstance(events[-1], Failed)
    stream = engine.submit(second)
    came_again.set()
    ids = [id async for event in stream if isinstance(event, Delta) for id in event.ids]
    assert ids == expected.ids
    assert_no_page_in_use(engine)


async def test_guesses_are_checked_one_step_after_the_other(start_engine: StartEngine, standin: StandinDevice) -> None:
    engine = start_engine(speculation="ngram", **OPTIONS)
    await generate(engine, prompt(10), max_tokens=30, ignore_eos=True, temperature=0.0)
    assert overlapped(engine) == 0
