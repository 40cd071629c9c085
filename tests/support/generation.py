"""Driving an engine in tests: submit, collect, and compare token ids."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from engine.api import Admitted, Delta, Engine, Failed, Finished, GenerateRequest, SamplingParams

_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class Output:
    """What a request gave: the text and ids of its deltas, its prompt's cached tokens, its terminal event."""

    text: str
    ids: list[int]
    cached: int
    end: Finished | Failed


async def generate(
    engine: Engine,
    prompt: np.ndarray | list[int],
    *,
    namespace: str = "",
    use_cache: bool = True,
    adapter: str | None = None,
    **params: object,
) -> Output:
    """One request, greedy unless told otherwise."""
    sampling = SamplingParams(**{"temperature": 0.0, **params})  # type: ignore[arg-type]
    tokens = np.asarray(prompt, dtype=np.int32)
    request = GenerateRequest(f"test-{next(_ids)}", tokens, sampling, namespace, use_cache=use_cache, adapter=adapter)
    text, ids, cached = "", [], 0
    async for event in engine.submit(request):
        match event:
            case Admitted():
                cached = event.cached_tokens
            case Delta():
                text += event.text
                ids += event.ids
            case Finished() | Failed():
                return Output(text, ids, cached, event)
    raise AssertionError("the stream ended without a terminal event")


class Reference:
    """What transformers' model says to prompts; the same one is asked once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._known: dict[tuple[bytes, int], tuple[list[int], list[float]]] = {}

    def greedy(self, prompt: np.ndarray, count: int) -> tuple[list[int], list[float]]:
        """See reference_greedy."""
        key = prompt.tobytes(), count
        if key not in self._known:
            self._known[key] = reference_greedy(self.model, prompt, count)
        return self._known[key]


def reference_greedy(model: PreTrainedModel, prompt: np.ndarray, count: int) -> tuple[list[int], list[float]]:
    """transformers' own greedy continuation of `count` ids, and at each the distance of the two best logits."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    margins = []
    for logits in out.logits:
        best = logits[0].topk(2).values
        margins.append(float(best[0] - best[1]))
    return out.sequences[0, len(prompt) :].tolist(), margins


def assert_same_tokens(actual: list[int], expected: list[int], margins: list[float]) -> None:
    """Equal, or first different where the reference could not tell its two best tokens apart (closer than 1e-3)."""
    for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        if ours != theirs:
            assert margins[index] < 1e-3, f"token {index} is {ours}, not {theirs} (margin {margins[index]:.4f})"
            return
