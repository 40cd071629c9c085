"""The engine end to end on a small model: one terminal event for each request, and no page ever lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from engine.api import Admitted, Delta, Failed, Finished, GenerateRequest, Grammar, Progress, Queued, SamplingParams
from engine.errors import EngineBroken, EngineStopped, InvalidRequest, ModelError, QueueFull, RequestTooLong
from engine.local import LocalEngine
from tests.engine.conftest import StartEngine
from tests.support.generation import Reference, assert_same_tokens, generate

pytestmark = pytest.mark.on_a_card


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 250, length).astype(np.int32)


async def idle(engine: LocalEngine) -> None:
    """Waits until the engine has taken in all messages: a flush is answered between two steps."""
    await engine.flush()


def assert_no_page_in_use(engine: LocalEngine) -> None:
    pages = engine.snapshot().pages
    assert (pages.locked, pages.private) == (0, 0)
    assert pages.free + pages.evictable == engine.info.num_pages


async def test_events_come_in_order_with_one_terminal(start_engine: StartEngine) -> None:
    engine = start_engine(max_batched_tokens=16, max_running=4)
    request = GenerateRequest("a", prompt(40), SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    events = [event async for event in engine.submit(request)]
    kinds = [type(event) for event in events]
    assert kinds[:4] == [Queued, Admitted, Progress, Progress]
    assert kinds[-1] is Finished
    assert set(kinds[4:-1]) == {Delta}
    progress = [(e.processed, e.total, e.cached) for e in events if isinstance(e, Progress)]
    assert progress == [(16, 40, 0), (32, 40, 0)]
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.usage.prompt_tokens, end.usage.completion_tokens) == ("length", 40, 5)
    assert end.timings.ttft_ms is not None
    assert end.timings.total_ms >= end.timings.ttft_ms > 0
    assert_no_page_in_use(engine)


@pytest.mark.every_attention
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 16), (16, 512)])
async def test_greedy_is_the_reference_however_it_is_computed(
    page_size: int, chunk: int, start_engine: StartEngine, reference: Reference
) -> None:
    engine = start_engine(page_size=page_size, max_batched_tokens=chunk, max_running=8)
    history = prompt(70, seed=1)
    for turn in range(3):
        expected, margins = reference.greedy(history, 20)
        common = {"max_tokens": 20, "ignore_eos": True, "min_tokens": 20}
        off = await generate(engine, history, use_cache=False, **common)
        warm = await generate(engine, history, **common)
        others = [generate(engine, prompt(30 + 9 * i, seed=100 + i), **common) for i in range(7)]
        beside, *_ = await asyncio.gather(generate(engine, history, **common), *others)
        assert await engine.flush()
        cold = await generate(engine, history, **common)
        for output in (off, warm, beside, cold):
            assert_same_tokens(output.ids, expected, margins)
        assert off.cached == cold.cached == 0
        assert warm.cached == (
            0 if turn == 0 else (len(history) - 1) // page_size * page_size - lost(turn, page_size, history)
        )
        assert beside.cached == (len(history) - 1) // page_size * page_size
        history = np.concatenate((history, np.asarray(cold.ids, np.int32), prompt(15, seed=turn + 2)))
    assert_no_page_in_use(engine)


def lost(turn: int, page_size: int, history: np.ndarray) -> int:
    """Of a next turn's prompt, what the earlier turn did not leave: its last sampled token and the new ones."""
    earlier = len(history) - 15
    return (len(history) - 1) // page_size * page_size - (earlier - 1) // page_size * page_size


@pytest.mark.every_attention
async def test_cached_tokens_of_many_turns(start_engine: StartEngine) -> None:
    engine = start_engine(page_size=1)
    history = prompt(50)
    earlier = 0
    for turn in range(8):
        output = await generate(engine, history, max_tokens=12, min_tokens=12, ignore_eos=True)
        assert output.cached == (0 if turn == 0 else earlier - 1)
        assert isinstance(output.end, Finished)
        assert output.end.usage.prefilled_tokens == len(history) - output.cached
        earlier = len(history) + 12
        history = np.concatenate((history, np.asarray(output.ids, np.int32), prompt(9, seed=turn)))


@pytest.mark.every_attention
@pytest.mark.parametrize(
    ("length", "max_tokens", "generated", "reason"),
    [
        (511, 1, 1, "length"),
        (511, None, 1, "length"),
        (500, None, 12, "length"),
        (512, 0, 0, "length"),
        (10, 0, 0, "length"),
        (10, 1, 1, "length"),
        (1, 3, 3, "length"),
    ],
)
async def test_lengths_up_to_the_context(
    length: int, max_tokens: int | None, generated: int, reason: str, start_engine: StartEngine
) -> None:
    engine = start_engine(context_length=512)
    output = await generate(engine, prompt(length), max_tokens=max_tokens, ignore_eos=True)
    assert isinstance(output.end, Finished)
    assert (output.end.usage.completion_tokens, output.end.reason) == (generated, reason)
    assert_no_page_in_use(engine)


@pytest.mark.parametrize(
    ("length", "max_tokens", "pool", "limit", "what"),
    [
        (513, 0, 4096, 512, "context"),
        (512, 1, 4096, 512, "context"),
        (512, None, 4096, 512, "context"),
        (500, 13, 4096, 512, "context"),
        (128, 1, 128, 128, "KV pool"),
        (129, 0, 128, 128, "KV pool"),
    ],
)
async def test_what_cannot_fit_is_refused_at_once(
    length: int, max_tokens: int | None, pool: int, limit: int, what: str, start_engine: StartEngine
) -> None:
    engine = start_engine(context_length=512, pool_tokens=pool)
    with pytest.raises(RequestTooLong) as caught:
        await generate(engine, prompt(length), max_tokens=max_tokens)
    assert (caught.value.prompt_tokens, caught.value.limit, caught.value.what) == (length, limit, what)
    assert (await generate(engine, prompt(20), max_tokens=2)).ids  # and the engine goes on


async def test_a_pool_beyond_the_memory_is_refused(start_engine: StartEngine) -> None:
    with pytest.raises(ModelError, match=r"takes .* GiB, and this machine has"):
        start_engine(pool_tokens=10**12)


@pytest.mark.every_attention
async def test_preempted_requests_end_with_the_same_tokens(start_engine: StartEngine, reference: Reference) -> None:
    engine = start_engine(pool_tokens=160, page_size=4, max_batched_tokens=64)
    common = {"max_tokens": 60, "min_tokens": 60, "ignore_eos": True}
    prompts = [prompt(30, seed=s) for s in range(5)]
    outputs = await asyncio.gather(*(generate(engine, p, **common) for p in prompts))
    assert engine.snapshot().preemptions > 0
    for output, p in zip(outputs, prompts, strict=True):
        assert_same_tokens(output.ids, *reference.greedy(p, 60))
    assert_no_page_in_use(engine)


@pytest.mark.every_attention
async def test_seeded_text_survives_neighbours_and_preemption(start_engine: StartEngine) -> None:
    roomy, tight = start_engine(), start_engine(pool_tokens=160, page_size=4)
    common = {"max_tokens": 50, "min_tokens": 50, "temperature": 1.0}
    alone = await generate(roomy, prompt(30), seed=11, **common)
    beside = await asyncio.gather(*(generate(tight, prompt(30), seed=11 + i, **common) for i in range(5)))
    assert tight.snapshot().preemptions > 0
    assert beside[0].ids == alone.ids
    assert len({tuple(output.ids) for output in beside}) == 5


@pytest.mark.every_attention
async def test_the_last_one_running_ends_by_length_when_the_pool_is_full(start_engine: StartEngine) -> None:
    engine = start_engine(pool_tokens=64, page_size=4)
    output = await generate(engine, prompt(40), ignore_eos=True)
    assert isinstance(output.end, Finished)
    assert (output.end.reason, output.end.usage.total_tokens) == ("length", 64)
    assert_no_page_in_use(engine)


@pytest.mark.every_attention
async def test_three_conversations_evict_one_another(start_engine: StartEngine, reference: Reference) -> None:
    engine = start_engine(pool_tokens=256, page_size=4)
    histories = [prompt(60, seed=s) for s in range(3)]
    for turn in range(10):
        for index, history in enumerate(histories):
            output = await generate(engine, history, max_tokens=10, min_tokens=10, ignore_eos=True)
            assert_same_tokens(output.ids, *reference.greedy(history, 10))
            histories[index] = np.concatenate((history, np.asarray(output.ids, np.int32), prompt(5, seed=turn)))
    assert engine.snapshot().counters["evicted_pages"] > 0
    assert_no_page_in_use(engine)


STAGES: list[tuple[str, type]] = [
    ("queued", Queued),
    ("admitted", Admitted),
    ("between chunks", Progress),
    ("decoding", Delta),
]


@pytest.mark.parametrize(("stage", "event"), STAGES, ids=[name for name, _ in STAGES])
async def test_abort_frees_the_pages_and_ends_the_stream(stage: str, event: type, start_engine: StartEngine) -> None:
    engine = start_engine(max_batched_tokens=16)
    request = GenerateRequest("doomed", prompt(100), SamplingParams(temperature=0.0, ignore_eos=True))
    seen = []
    async for received in engine.submit(request):
        seen.append(received)
        if isinstance(received, event):
            engine.abort("doomed")
    assert isinstance(seen[-1], Finished)
    assert seen[-1].reason == "cancelled"
    assert_no_page_in_use(engine)
    engine.abort("doomed")
    engine.abort("never seen")
    again = await generate(engine, prompt(100), max_tokens=3, ignore_eos=True)
    assert len(again.ids) == 3


@pytest.mark.every_attention
async def test_an_aborted_prefill_leaves_its_chunks_for_the_next_attempt(start_engine: StartEngine) -> None:
    engine = start_engine(max_batched_tokens=16, page_size=4)
    for _ in range(2):
        request = GenerateRequest("doomed", prompt(60), SamplingParams(temperature=0.0))
        async for event in engine.submit(request):
            if isinstance(event, Progress):
                engine.abort("doomed")
    output = await generate(engine, prompt(60), max_tokens=1)
    assert output.cached >= 16


@pytest.mark.every_attention
async def test_an_identical_prompt_beside_a_running_prefill_finds_its_chunks(start_engine: StartEngine) -> None:
    engine = start_engine(max_batched_tokens=16, page_size=2)
    first, second = await asyncio.gather(
        *(generate(engine, prompt(100), max_tokens=4, ignore_eos=True) for _ in range(2))
    )
    assert first.ids == second.ids
    assert_no_page_in_use(engine)


REFUSED: list[tuple[str, Callable[[], GenerateRequest]]] = [
    ("no tokens", lambda: GenerateRequest("x", np.empty(0, np.int32))),
    ("two dimensions", lambda: GenerateRequest("x", np.ones((2, 2), np.int32))),
    ("negative id", lambda: GenerateRequest("x", np.asarray([5, -1], np.int32))),
    ("id beyond the vocabulary", lambda: GenerateRequest("x", np.asarray([5, 100_000], np.int32))),
    ("stop id beyond", lambda: GenerateRequest("x", prompt(3), SamplingParams(stop_token_ids=(100_000,)))),
    ("stop id beyond all numbers", lambda: GenerateRequest("x", prompt(3), SamplingParams(stop_token_ids=(2**70,)))),
    ("biased id beyond", lambda: GenerateRequest("x", prompt(3), SamplingParams(logit_bias=((100_000, 1.0),)))),
    ("negative biased id", lambda: GenerateRequest("x", prompt(3), SamplingParams(logit_bias=((-1, 1.0),)))),
    ("no grammar", lambda: GenerateRequest("x", prompt(3), SamplingParams(grammar=Grammar("regex", "(")))),
]


@pytest.mark.parametrize(("name", "request_"), REFUSED, ids=[name for name, _ in REFUSED])
async def test_unusable_requests_are_refused(
    name: str, request_: Callable[[], GenerateRequest], start_engine: StartEngine
) -> None:
    engine = start_engine()
    with pytest.raises(InvalidRequest):
        engine.submit(request_())
    assert (await generate(engine, prompt(5), max_tokens=1)).ids


async def test_an_id_in_use_is_refused_and_the_queue_is_bounded(start_engine: StartEngine) -> None:
    engine = start_engine(max_waiting=2, max_running=1)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    running = engine.submit(GenerateRequest("running", prompt(5), params))
    async for event in running:
        if isinstance(event, Admitted):
            break
    with pytest.raises(InvalidRequest):
        engine.submit(GenerateRequest("running", prompt(5), params))
    waiting = [engine.submit(GenerateRequest(f"w{i}", prompt(5), params)) for i in range(2)]
    with pytest.raises(QueueFull):
        engine.submit(GenerateRequest("too many", prompt(5), params))
    for name in ("running", "w0", "w1"):
        engine.abort(name)
    for stream in waiting:
        assert isinstance([e async for e in stream][-1], Finished)
    assert engine.snapshot().waiting == 0


async def test_higher_priority_goes_first(start_engine: StartEngine) -> None:
    engine = start_engine(max_running=1)
    order: list[str] = []

    async def run(name: str, priority: int) -> None:
        request = GenerateRequest(name, prompt(20), SamplingParams(max_tokens=3, ignore_eos=True), priority=priority)
        async for event in engine.submit(request):
            if isinstance(event, Admitted):
                order.append(name)

    await asyncio.gather(run("first", 0), run("background", -1), run("interactive", 1))
    assert order.index("interactive") < order.index("background")


@pytest.mark.every_attention
async def test_a_failing_step_fails_its_requests_only(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine()
    original = engine._stepper._runner.launch

    def broken(*step: object) -> object:
        monkeypatch.setattr(engine._stepper._runner, "launch", original)
        raise RuntimeError("boom")

    monkeypatch.setattr(engine._stepper._runner, "launch", broken)
    output = await generate(engine, prompt(20), max_tokens=2)
    assert isinstance(output.end, Failed)
    assert output.end.code == "engine_error"
    assert "boom" not in output.end.message
    assert (await generate(engine, prompt(20), max_tokens=2)).ids
    assert_no_page_in_use(engine)


async def test_an_engine_that_has_ended_by_a_fault_says_so(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine()

    def broken() -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(engine._stepper, "step", broken)
    output = await asyncio.wait_for(generate(engine, prompt(20), max_tokens=2), 30)
    assert isinstance(output.end, Failed)
    assert output.end.code == "engine_error"
    with pytest.raises(EngineBroken):
        await generate(engine, prompt(20), max_tokens=2)
    with pytest.raises(EngineBroken):
        await engine.flush()
    assert engine.snapshot().broken
    await engine.close()


async def test_flush_waits_for_nobody_and_refuses_while_pages_are_held(start_engine: StartEngine) -> None:
    engine = start_engine()
    stream = engine.submit(GenerateRequest("running", prompt(50), SamplingParams(temperature=0.0, ignore_eos=True)))
    async for event in stream:
        if isinstance(event, Admitted):
            assert not await engine.flush()
            engine.abort("running")
    assert await engine.flush()
    assert engine.snapshot().pages.free == engine.info.num_pages


async def test_close_ends_every_request_and_refuses_new_ones(start_engine: StartEngine) -> None:
    engine = start_engine(max_running=1)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    streams = [engine.submit(GenerateRequest(f"r{i}", prompt(5), params)) for i in range(3)]
    await engine.close()
    for stream in streams:
        last = [event async for event in stream][-1]
        assert isinstance(last, Failed)
        assert last.code == "shutdown"
    with pytest.raises(EngineStopped):
        engine.submit(GenerateRequest("late", prompt(5)))
    with pytest.raises(EngineStopped):
        await engine.flush()
    await engine.close()
