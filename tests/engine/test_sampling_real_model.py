"""Structured output and log probabilities of the default model, as it is served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.api import Delta, Failed, Finished, GenerateRequest, Grammar, SampledLogprob, SamplingParams
from engine.config import EngineConfig
from engine.loading import load_engine
from engine.local import LocalEngine
from engine.text.api import ChatMessage

pytestmark = pytest.mark.slow

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"type": "string", "maxLength": 20},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["city", "country", "rivers"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(models_dir: Path) -> Iterator[LocalEngine]:
    engine = load_engine(EngineConfig(models_dir, pool_tokens=4096))
    yield engine
    asyncio.run(engine.close())


async def ask(engine: LocalEngine, question: str, **params: Any) -> tuple[str, list[Delta], Finished | Failed]:
    tokens = engine.codec.prompt([ChatMessage("user", question)]).tokens
    deltas: list[Delta] = []
    async for event in engine.submit(GenerateRequest(f"q{question}", tokens, SamplingParams(**params))):
        if isinstance(event, Delta):
            deltas.append(event)
        elif isinstance(event, Finished | Failed):
            return "".join(delta.text for delta in deltas), deltas, event
    raise AssertionError("the stream ended without a terminal event")


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.5, "seed": 5}])
async def test_a_schema_is_followed(engine: LocalEngine, sampling: dict[str, Any]) -> None:
    grammar = Grammar("json_schema", json.dumps(CITY))
    text, _, end = await ask(engine, "Tell me of Paris, in JSON.", grammar=grammar, max_tokens=400, **sampling)
    assert isinstance(end, Finished)
    assert end.reason == "stop"
    value = json.loads(text)
    assert list(value) == ["city", "country", "rivers"]
    assert all(isinstance(value[name], str) and len(value[name]) <= 20 for name in ("city", "country"))
    assert all(isinstance(river, str) for river in value["rivers"])
    assert len(value["rivers"]) <= 3


async def test_ids_held_back_keep_their_logprobs(engine: LocalEngine) -> None:
    grammar = Grammar("regex", "🙂é{3}🦙")
    text, deltas, end = await ask(engine, "Smile.", grammar=grammar, temperature=0.0, max_tokens=40, logprobs=2)
    assert isinstance(end, Finished)
    assert (text, end.reason) == ("🙂ééé🦙", "stop")
    assert any(len(delta.ids) > 1 for delta in deltas)
    told: list[SampledLogprob] = []
    for delta in deltas:
        assert [entry.sampled.id for entry in delta.logprobs] == list(delta.ids)
        assert b"".join(entry.sampled.bytes for entry in delta.logprobs).decode() == delta.text
        told += delta.logprobs
    assert len(told) == end.usage.completion_tokens
