"""The default model in float32: token for token what transformers says, however the tokens were computed.

The reference reads the same GGUF file with transformers' own loader, so nothing of ours is in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.api import Finished
from engine.config import DEFAULT_MODEL, EngineConfig
from engine.loading import load_engine
from engine.local import LocalEngine
from engine.text.api import ChatMessage, Encoded
from engine.weights.source import parse_source
from tests.support.generation import Output, Reference, assert_same_tokens, generate

pytestmark = pytest.mark.slow

QUESTIONS = ["What is the capital of Germany?", "And of Italy? Answer briefly.", "Which of the two is larger?"]
TOKENS = 12
NEIGHBOURS = 3
PARAMS = {"max_tokens": TOKENS, "min_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def reference(models_dir: Path) -> Reference:
    path = parse_source(DEFAULT_MODEL).fetch(models_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))  # the file is read for the config and for the weights
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
    return Reference(model.eval())


@pytest.fixture(params=[(1, 16), (16, 512)], ids=["pages of 1, chunks of 16", "pages of 16, chunks of 512"])
async def engine(request: pytest.FixtureRequest, models_dir: Path) -> AsyncIterator[LocalEngine]:
    page_size, chunk = request.param
    engine = load_engine(
        EngineConfig(
            models_dir, dtype="float32", page_size=page_size, max_batched_tokens=chunk, pool_tokens=4096, max_running=8
        )
    )
    yield engine
    await engine.close()


async def test_greedy_equals_transformers(engine: LocalEngine, reference: Reference) -> None:
    messages: list[ChatMessage] = []
    page = engine.info.page_size
    earlier = 0
    for question in QUESTIONS:
        messages.append(ChatMessage("user", question))
        tokens = engine.codec.prompt(messages).tokens
        expected, margins = reference.greedy(tokens, TOKENS)
        warm = await generate(engine, tokens, **PARAMS)
        off = await generate(engine, tokens, use_cache=False, **PARAMS)
        beside, *_ = await asyncio.gather(generate(engine, tokens, **PARAMS), *neighbours(engine))
        for output in (warm, off, beside):
            assert_same_tokens(output.ids, expected, margins)
        assert_prefills_only_what_is_new(warm, earlier, page)
        earlier = len(tokens) + TOKENS
        # The answer goes into the next prompt as the very ids that were generated.
        answer = np.asarray(warm.ids, dtype=np.int32)
        messages.append(ChatMessage("assistant", warm.text, Encoded(answer, engine.codec.fingerprint)))
    assert await engine.flush()
    flushed = await generate(engine, tokens, **PARAMS)
    assert_same_tokens(flushed.ids, expected, margins)


def neighbours(engine: LocalEngine) -> list[asyncio.Task[Output]]:
    texts = [f"Tell me {n} things about the number {n}." for n in range(NEIGHBOURS)]
    prompts = [engine.codec.prompt([ChatMessage("user", text)]).tokens for text in texts]
    return [asyncio.ensure_future(generate(engine, tokens, **PARAMS)) for tokens in prompts]


def assert_prefills_only_what_is_new(output: Output, earlier: int, page: int) -> None:
    assert isinstance(output.end, Finished)
    usage = output.end.usage
    assert usage.cached_tokens == output.cached == max(0, earlier - 1) // page * page
    assert usage.prefilled_tokens == usage.prompt_tokens - usage.cached_tokens


async def test_the_packed_model_knows_the_capital_of_germany(models_dir: Path) -> None:
    engine = load_engine(EngineConfig(models_dir, pool_tokens=4096))
    try:
        # The dense model is sure of every word: its two best tokens are further apart than rounding can move them.
        tokens = engine.codec.prompt([ChatMessage("user", QUESTIONS[0])]).tokens
        output = await generate(engine, tokens, max_tokens=40)
        assert isinstance(output.end, Finished)
        assert "Berlin" in output.text
        assert output.end.reason == "stop"
        assert "<|im_end|>" not in output.text
    finally:
        await engine.close()
