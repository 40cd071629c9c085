"""A sequence whose numbers overflow fails alone: its neighbours, and whoever takes its place, are not touched."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.api import Delta, Failed, Finished, GenerateRequest, SamplingParams
from engine.local import LocalEngine
from tests.engine.conftest import StartEngine
from tests.support.standin_device import StandinDevice

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.every_attention]


@pytest.fixture(autouse=True)
def no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay runs no code that could be put in the way of."""
    monkeypatch.setattr(StandinDevice, "graphs", lambda self: None)


PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


async def ask(engine: LocalEngine, name: str, seed: int, length: int = 20) -> tuple[list[int], Finished | Failed]:
    """The tokens and the end of one greedy answer to random tokens."""
    prompt = np.random.default_rng(seed).integers(3, 250, length).astype(np.int32)
    tokens: list[int] = []
    async for event in engine.submit(GenerateRequest(name, prompt, PARAMS)):
        if isinstance(event, Delta):
            tokens += event.ids
        if isinstance(event, Finished | Failed):
            return tokens, event
    raise AssertionError("a stream without an end")


def poison_once(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, *, then: Exception | None = None) -> None:
    """In the first step of three single tokens the first one's embedding is no number; the step may fail."""
    model = engine._stepper._runner._model
    embed, forward, done = F.embedding, model.forward, []

    def poisoned(tokens: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        x = embed(tokens, embedding)
        if len(tokens) == 3 and not done:
            done.append(True)
            x[0] = float("nan")
        return x

    def failing(*arguments: Any) -> torch.Tensor:
        first, logits = not done, forward(*arguments)
        if done and first and then is not None:
            raise then
        return logits

    monkeypatch.setattr("engine.models.decoder.F.embedding", poisoned)
    monkeypatch.setattr(model, "forward", failing)


@pytest.mark.parametrize("dtype", ["float32", "int4", "int8"])
async def test_only_the_sequence_itself_fails(
    dtype: str, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [await ask(start_engine(speculation="off", dtype=dtype), "r", seed) for seed in range(4)]
    engine = start_engine(speculation="off", dtype=dtype)
    poison_once(engine, monkeypatch)
    ends = await asyncio.wait_for(asyncio.gather(*(ask(engine, f"r{seed}", seed) for seed in range(3))), 60)
    assert all(len(tokens) > 20 for tokens, _ in alone)
    failed = [end for _, end in ends if isinstance(end, Failed)]
    assert [end.code for end in failed] == ["bad_logits"]
    for (tokens, end), (expected, _) in zip(ends, alone, strict=False):
        assert isinstance(end, Failed) or tokens == expected
    assert (await ask(engine, "later", 3))[0] == alone[3][0]


@pytest.mark.parametrize("dtype", ["float32", "int4"])
async def test_a_step_that_fails_midway_leaves_nothing(
    dtype: str, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = await ask(start_engine(speculation="off", dtype=dtype), "r", 3, length=5)
    engine = start_engine(speculation="off", dtype=dtype)
    poison_once(engine, monkeypatch, then=RuntimeError("out of memory"))
    ends = await asyncio.wait_for(asyncio.gather(*(ask(engine, f"r{seed}", seed) for seed in range(3))), 60)
    assert [end.code for _, end in ends if isinstance(end, Failed)] == ["engine_error"] * 3
    later = await asyncio.wait_for(asyncio.gather(*(ask(engine, f"s{n}", 3, length=5) for n in range(3))), 60)
    assert [tokens for tokens, _ in later] == [alone[0]] * 3
