"""The scheduler under a real model: streams beside long prompts, twins, lengths around every size, full pools."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from engine.api import Delta, Failed, Finished, GenerateRequest, Progress, SamplingParams
from engine.local import LocalEngine
from engine.scheduler import StepRow
from tests.engine.conftest import StartEngine
from tests.support.generation import Reference, assert_same_tokens, generate

pytestmark = pytest.mark.on_a_card


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 250, length).astype(np.int32)


def all_pages_are_back(engine: LocalEngine) -> bool:
    pages = engine.snapshot().pages
    return (pages.locked, pages.private, pages.free + pages.evictable) == (0, 0, engine.info.num_pages)


def record_steps(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Tokens computed for each request id, step by step."""
    steps: list[dict[str, int]] = []
    launch = engine._stepper._runner.launch

    def recorded(rows: list[StepRow], *rest: Any) -> object:
        steps.append({row.sequence.request.id: row.count for row in rows})
        return launch(rows, *rest)

    monkeypatch.setattr(engine._stepper._runner, "launch", recorded)
    return steps


async def submit(
    engine: LocalEngine, name: str, tokens: np.ndarray, max_tokens: int, started: asyncio.Event | None = None
) -> list[int]:
    """The ids of a greedy answer of exactly `max_tokens` tokens; `started` is set with the first of them."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, min_tokens=max_tokens, ignore_eos=True)
    ids: list[int] = []
    async for event in engine.submit(GenerateRequest(name, tokens, params)):
        if isinstance(event, Delta):
            ids += event.ids
            if started is not None:
                started.set()
        assert not isinstance(event, Failed)
    return ids


async def test_a_stream_waits_for_one_chunk_at_most(start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start_engine(max_batched_tokens=16)
    steps = record_steps(engine, monkeypatch)
    started = asyncio.Event()
    stream = asyncio.create_task(submit(engine, "stream", prompt(8), 60, started))
    await started.wait()
    await submit(engine, "long", prompt(20 * 16, seed=1), 1)
    await stream
    beside = [step for step in steps if "long" in step and "stream" in step]
    assert len(beside) > 20
    assert all(step["stream"] == 1 and step["long"] <= 15 for step in beside[1:])
    streaming = [index for index, step in enumerate(steps) if "stream" in step]
    assert streaming == list(range(streaming[0], streaming[-1] + 1))
    assert all(sum(step.values()) <= 16 for step in steps)


@pytest.mark.every_attention
@pytest.mark.parametrize("page_size", [4, 5])
async def test_lengths_around_every_size(page_size: int, start_engine: StartEngine) -> None:
    """Around the chunk (16), around the pool, all residues of the page; each with 0 and 1 tokens of output."""
    pool = 24 * page_size
    engine = start_engine(page_size=page_size, pool_tokens=pool, max_batched_tokens=16)
    for length in (15, 16, 17, pool - 2, pool - 1, *range(30, 30 + page_size)):
        for max_tokens in (0, 1):
            output = await generate(engine, prompt(length, seed=length), max_tokens=max_tokens, ignore_eos=True)
            assert isinstance(output.end, Finished)
            assert (output.end.reason, output.end.usage.completion_tokens) == ("length", max_tokens)
    output = await generate(engine, prompt(pool, seed=9), max_tokens=0)
    assert isinstance(output.end, Finished)
    assert all_pages_are_back(engine)


@pytest.mark.every_attention
@pytest.mark.parametrize(("count", "share"), [(2, 0.6), (8, 0.3)])
async def test_requests_that_do_not_fit_together(
    count: int, share: float, start_engine: StartEngine, reference: Reference
) -> None:
    engine = start_engine(page_size=4, pool_tokens=200, max_batched_tokens=32)
    prompts = [prompt(int(200 * share) - 20, seed=s) for s in range(count)]
    outputs = await asyncio.gather(
        *(generate(engine, p, max_tokens=20, min_tokens=20, ignore_eos=True) for p in prompts)
    )
    for output, p in zip(outputs, prompts, strict=True):
        assert isinstance(output.end, Finished)
        assert_same_tokens(output.ids, *reference.greedy(p, 20))
    assert all_pages_are_back(engine)


@pytest.mark.every_attention
@pytest.mark.parametrize("length", [7, 100])
async def test_twins_give_equal_output(
    length: int, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    """Shorter than a page they run side by side; longer ones compute what they share once."""
    engine = start_engine(page_size=8, max_batched_tokens=32)
    steps = record_steps(engine, monkeypatch)
    tokens = prompt(length)
    outputs = await asyncio.gather(*(submit(engine, f"twin {i}", tokens, 12) for i in range(4)))
    expected, margins = reference.greedy(tokens, 12)
    for output in outputs:
        assert_same_tokens(output, expected, margins)
    shared = (length - 1) // 8 * 8
    assert sum(sum(step.values()) for step in steps) == 4 * (length + 11) - 3 * shared


async def test_a_twin_is_computed_though_the_first_is_aborted(start_engine: StartEngine) -> None:
    engine = start_engine(page_size=4, max_batched_tokens=16)
    tokens = prompt(120)
    first = engine.submit(GenerateRequest("first", tokens, SamplingParams(temperature=0.0, ignore_eos=True)))
    second = asyncio.create_task(submit(engine, "second", tokens, 5))
    reasons = []
    async for event in first:
        if isinstance(event, Progress):
            engine.abort("first")
        if isinstance(event, Finished):
            reasons.append(event.reason)
    assert reasons == ["cancelled"]
    assert await second == await submit(engine, "alone", tokens, 5)
    assert all_pages_are_back(engine)


@pytest.mark.every_attention
async def test_a_prompt_that_was_aborted_between_chunks_comes_again(
    start_engine: StartEngine, reference: Reference
) -> None:
    engine = start_engine(page_size=4, max_batched_tokens=16)
    tokens = prompt(90)
    for chunks in (1, 2, 3):
        request = GenerateRequest(f"aborted after {chunks}", tokens, SamplingParams(temperature=0.0))
        seen = 0
        async for event in engine.submit(request):
            seen += isinstance(event, Progress)
            if seen == chunks:
                engine.abort(request.id)
        assert all_pages_are_back(engine)
    output = await generate(engine, tokens, max_tokens=10, min_tokens=10, ignore_eos=True)
    assert output.cached >= 48
    assert_same_tokens(output.ids, *reference.greedy(tokens, 10))


@pytest.mark.every_attention
async def test_preempted_in_the_middle_of_a_text(start_engine: StartEngine, reference: Reference) -> None:
    engine = start_engine(page_size=4, pool_tokens=120, max_batched_tokens=16)
    prompts = [prompt(20, seed=s) for s in range(3)]
    outputs = await asyncio.gather(
        *(generate(engine, p, max_tokens=50, min_tokens=50, ignore_eos=True) for p in prompts)
    )
    assert engine.snapshot().preemptions >= 1
    preempted = [o.end.timings.preemptions for o in outputs if isinstance(o.end, Finished)]
    assert preempted[0] == 0, "the oldest lost its pages"
    for output, p in zip(outputs, prompts, strict=True):
        assert_same_tokens(output.ids, *reference.greedy(p, 50))
    assert all_pages_are_back(engine)


async def test_background_work_without_room_fails_by_name(start_engine: StartEngine) -> None:
    engine = start_engine(page_size=4, pool_tokens=80)
    await generate(engine, prompt(70), max_tokens=2, ignore_eos=True)
    request = GenerateRequest("background", prompt(60, seed=1), SamplingParams(max_tokens=2), priority=-1)
    events = [event async for event in engine.submit(request)]
    assert isinstance(events[-1], Failed)
    assert events[-1].code == "no_room"
    assert (await generate(engine, prompt(70), max_tokens=2, ignore_eos=True)).cached == 68
