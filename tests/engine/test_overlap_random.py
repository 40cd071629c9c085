"""Random requests at random times, many of them aborted: on a card's stand-in all ends as on the CPU, step by step."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from engine.api import Delta, Failed, Finished, GenerateRequest, Grammar, SamplingParams
from engine.attention.flashinfer import FlashInferAttention
from engine.config import AdapterSource
from engine.devices import CpuDevice
from engine.local import LocalEngine
from tests.engine.conftest import StartEngine
from tests.engine.test_local_engine import assert_no_page_in_use
from tests.engine.test_overlap import on
from tests.support.standin_device import use_standin
from tests.support.tiny_adapters import ALL, layers_of, random_tensors, save_adapter

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Request:
    """delay: turns of the event loop before it is sent. abort_after: so many deltas; None: never."""

    delay: int
    abort_after: int | None
    request: GenerateRequest


@dataclass
class Got:
    """What a request gave, by choice."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    end: Any = None
    aborted: bool = False


def random_params(random: Random) -> dict[str, Any]:
    params: dict[str, Any] = {"temperature": random.choice((0.0, 0.7, 1.0, 1.5)), "seed": random.randrange(1000)}
    if random.random() < 0.25:
        params["top_k"] = random.choice((1, 5, 40, 2000))
    if random.random() < 0.25:
        params["top_p"] = random.choice((0.0, 0.3, 0.9, 0.97))
    if random.random() < 0.15:
        params["min_p"] = random.choice((0.02, 0.3))
    if random.random() < 0.08:
        params["repetition_penalty"] = 1.3
    if random.random() < 0.05:
        params["presence_penalty"] = 0.5
    if random.random() < 0.05:
        params["logit_bias"] = ((50, 3.0), (2, 4.0))
    if random.random() < 0.08:
        params["logprobs"] = random.choice((0, 3))
    if random.random() < 0.06:
        params["grammar"] = random.choice((Grammar("regex", "[A-C]{2,9}"), Grammar("json_object")))
    params["max_tokens"] = random.choice((0, 1, 2, 3, 8, 20, 40, None if random.random() < 0.2 else 10))
    most = params["max_tokens"] if params["max_tokens"] is not None else 20
    if random.random() < 0.15:
        params["min_tokens"] = random.randint(0, most)
    params["ignore_eos"] = random.random() < 0.6
    if random.random() < 0.2:
        params["stop_token_ids"] = tuple(random.sample(range(3, 250), 20))
    if random.random() < 0.25:
        params["stop"] = tuple(random.choice("ABCDEFGHabcdef0123") for _ in range(4))
    return params


def random_requests(random: Random, count: int, context: int, max_running: int, adapters: bool) -> list[Request]:
    stems = [np.random.default_rng(seed).integers(3, 250, context).astype(np.int32) for seed in range(2)]
    requests = []
    delay = 0
    for number in range(count):
        delay += random.choice((0, 0, 1, 3, 8, 20))
        length = random.choice((1, 2, 3, 15, 16, 17, 33, 47, 48, 60, random.randint(1, context // 2)))
        prompt = random.choice(stems)[:length].copy()
        if random.random() < 0.7:
            prompt[random.randrange(length) :] = random.randrange(3, 250)
        params = random_params(random)
        if params["max_tokens"] is not None:
            params["max_tokens"] = min(params["max_tokens"], context - length)
            params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
        request = GenerateRequest(
            f"r{number}",
            prompt,
            SamplingParams(**params),
            namespace=random.choice(("", "", "other")),
            owner=random.choice((None, "a", "b")),
            priority=random.choice((0, 0, 0, 0, 1, -1)),
            use_cache=random.random() < 0.85,
            n=random.choice((1, 1, 1, min(2, max_running), min(3, max_running))),
            tenant=random.choice(("", "x")),
            adapter=random.choice((None, None, "ann", "bob")) if adapters else None,
        )
        abort_after = random.choice((0, 0, 1, 2, 5, 9)) if random.random() < 0.15 else None
        requests.append(Request(delay, abort_after, request))
    return requests


async def run_all(engine: LocalEngine, requests: list[Request]) -> list[Got]:
    async def one(entry: Request) -> Got:
        for _ in range(entry.delay):
            await asyncio.sleep(0)
            if random.random() < 0.2:
                await asyncio.sleep(0.0005)
        got, deltas = Got(), 0
        stream = engine.submit(entry.request)
        if entry.abort_after == 0:
            engine.abort(entry.request.id)
            got.aborted = True
        async for event in stream:
            assert got.end is None
            if isinstance(event, Delta):
                assert event.index not in got.reasons
                deltas += 1
                got.ids.setdefault(event.index, []).extend(event.ids)
                got.text[event.index] = got.text.get(event.index, "") + event.text
                if event.reason is not None:
                    got.reasons[event.index] = event.reason
                if entry.abort_after is not None and deltas >= entry.abort_after and not got.aborted:
                    engine.abort(entry.request.id)
                    got.aborted = True
            if isinstance(event, Finished | Failed):
                got.end = event
        return got

    random = Random(1)
    return await asyncio.gather(*map(one, requests))


def compare(entry: Request, ours: Got, theirs: Got) -> None:
    background = entry.request.priority < 0
    loose = ours.aborted or theirs.aborted or background  # how far they come is a matter of time
    assert ours.end is not None
    assert theirs.end is not None
    for index in range(entry.request.n):
        a, b = ours.ids.get(index, []), theirs.ids.get(index, [])
        if loose:
            size = min(len(a), len(b))
            assert a[:size] == b[:size], (entry, ours, theirs)
        else:
            assert a == b, (entry, index, ours, theirs)
            assert ours.text.get(index) == theirs.text.get(index)
            assert ours.reasons.get(index) == theirs.reasons.get(index)
    if not loose:
        assert type(ours.end) is type(theirs.end), (entry, ours.end, theirs.end)
        if isinstance(ours.end, Finished):
            assert ours.end.reason == theirs.end.reason
            assert replace(ours.end.usage, cached_tokens=0) == replace(theirs.end.usage, cached_tokens=0)
        else:
            assert (ours.end.code, ours.end.message) == (theirs.end.code, theirs.end.message)


@pytest.fixture(scope="module")
def adapters(tiny: tuple[Path, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> tuple[AdapterSource, ...]:
    sources = []
    for seed, name in enumerate(("ann", "bob")):
        ranks = dict.fromkeys(layers_of(tiny[1], *ALL), 4)
        folder = tmp_path_factory.mktemp("adapters") / name
        save_adapter(folder, random_tensors(tiny[1], ranks, seed=seed))
        sources.append(AdapterSource(name, folder))
    return tuple(sources)


@pytest.mark.parametrize("seed", range(2))
async def test_random(
    seed: int,
    start_engine: StartEngine,
    adapters: tuple[AdapterSource, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = Random(seed)
    page_size = random.choice((1, 3, 16))
    max_running = random.choice((1, 2, 4, 6))
    with_adapters = random.random() < 0.3
    cascade = random.random() < 0.5
    options: dict[str, Any] = {
        "context_length": 160,
        "page_size": page_size,
        "pool_tokens": random.choice((160, 192, 288, 800)) // page_size * page_size,
        "max_running": max_running,
        "max_batched_tokens": max(max_running, random.choice((6, 16, 48, 128))),
        "max_long_prefills": random.choice((1, 2)),
        "max_waiting": 1000,
        "prefix_cache": random.random() < 0.85,
        "adapters": adapters if with_adapters else (),
    }
    context = min(160, options["pool_tokens"])
    requests = random_requests(random, 25, context, max_running, with_adapters)
    short = random.random() < 0.4
    standin = use_standin(monkeypatch)
    if cascade:
        monkeypatch.setattr("engine.attention.build.FlashInferAttention", partial(FlashInferAttention, least_saved=1))
    if short:
        monkeypatch.setattr("engine.sampling.on_device.SHORTLIST", 5)
    got = []
    for device in (standin, CpuDevice()):
        on(device, monkeypatch)
        engine: LocalEngine = start_engine(speculation="off", **options)
        got.append(await asyncio.wait_for(run_all(engine, requests), 300))
        snapshot = engine.snapshot()
        assert not snapshot.broken
        assert (snapshot.running, snapshot.waiting) == (0, 0)
        assert await engine.flush()
        assert_no_page_in_use(engine)
        engine._cache.check()
        assert (engine._stepper.overlapped > 0) == (device is standin)
    for entry, ours, theirs in zip(requests, *got, strict=True):
        compare(entry, ours, theirs)
