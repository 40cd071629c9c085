"""Turn after turn on models whose layers see only windows, and with templates that drop reasoning: what is found in the
cache is said exactly, and the answer is that of the whole prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.api import Admitted, Delta, GenerateRequest, SamplingParams
from engine.config import EngineConfig
from engine.loading import load_engine
from engine.local import LocalEngine
from engine.text.api import ChatMessage, Encoded
from tests.engine.text.tiny_tokenizers import CHATML_REASONING
from tests.support.generation import assert_same_tokens, generate, reference_greedy
from tests.support.tiny_models import save_tiny

pytestmark = [pytest.mark.usefixtures("one_thread", "attention"), pytest.mark.every_attention]

WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "every layer": ("mistral", {"sliding_window": 10}),
    "upper layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "every other layer": ("gemma2", {"head_dim": 16, "sliding_window": 9}),
}


@pytest.mark.parametrize(("model_type", "options"), WINDOWED.values(), ids=WINDOWED)
async def test_windowed_layers_hit_like_others(model_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "model", model_type, **options)
    engine = started(tmp_path, page_size=4, max_batched_tokens=16)
    common = {"max_tokens": 14, "min_tokens": 14, "ignore_eos": True}
    try:
        history = np.random.default_rng(0).integers(3, 250, 50).astype(np.int32)
        earlier = 1
        for turn in range(3):
            expected, margins = reference_greedy(reference, history, 14)
            cached = await generate(engine, history, **common)
            cold = await generate(engine, history, use_cache=False, **common)
            assert (cached.cached, cold.cached) == ((earlier - 1) // 4 * 4, 0)
            for output in (cached, cold):
                assert_same_tokens(output.ids, expected, margins)
            earlier = len(history) + 14
            new = np.random.default_rng(turn + 1).integers(3, 250, 9).astype(np.int32)
            history = np.concatenate((history, np.asarray(expected, np.int32), new))
    finally:
        await engine.close()


@dataclass(frozen=True)
class Turn:
    """What a request found, and why not more; and what it gave."""

    cached: int
    miss: str
    ids: list[int]


async def answer(engine: LocalEngine, tokens: np.ndarray, name: str) -> Turn:
    cached, miss, ids = -1, "", []
    params = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=8, ignore_eos=True)
    async for event in engine.submit(GenerateRequest(name, tokens, params)):
        match event:
            case Admitted():
                cached, miss = event.cached_tokens, event.miss
            case Delta():
                ids += event.ids
    return Turn(cached, miss, ids)


async def test_dropped_reasoning_is_an_honest_miss(tmp_path: Path) -> None:
    """As with Qwen3 and SmolLM3: the reasoning of earlier turns is not in the next prompt, whose rest is computed anew.

    turn 1   [question 1][<think>..</think>][answer 1]
    turn 2   [question 1][answer 1][question 2]          found: up to the reasoning
    turn 3   [question 1][answer 1][question 2][answer 2][question 3]    found: up to the second reasoning
    """
    reference = save_tiny(tmp_path / "model", "qwen3", head_dim=16)
    settings = {"chat_template": CHATML_REASONING, "eos_token": "<|im_end|>"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    engine = started(tmp_path, page_size=1)
    codec = engine.codec
    try:
        messages: list[ChatMessage] = []
        found = 0
        for turn in range(3):
            messages.append(ChatMessage("user", f"QUESTION {turn}?"))
            tokens = codec.prompt(messages).tokens
            assert "hm" not in codec.decode(tokens)
            expected, margins = reference_greedy(reference, tokens, 8)
            result = await answer(engine, tokens, f"turn {turn}")
            assert_same_tokens(result.ids, expected, margins)
            assert (result.cached, result.miss) == (found, "new" if turn == 0 else f"diverged@{found}")
            # The model thinks and answers; all that it says is in the cache, under the ids that it said.
            text = f"<think>\nhm {turn}\n</think>\n\nANSWER {turn}."
            said = np.append(codec.encode(text), np.int32(2)).astype(np.int32)
            await answer(engine, np.concatenate((tokens, said)), f"said {turn}")
            messages.append(ChatMessage("assistant", text, Encoded(said, codec.fingerprint)))
            found = len(tokens)
    finally:
        await engine.close()


def started(folder: Path, **options: Any) -> LocalEngine:
    return load_engine(EngineConfig(folder / "models", str(folder / "model"), dtype="float32", **options))
