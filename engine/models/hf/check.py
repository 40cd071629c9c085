"""Before a model may answer: over our keys and values it must give what it gives in transformers alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from engine.attention import AttentionRow, CpuAttention
from engine.errors import ModelError
from engine.models.hf.interface import NAME
from engine.models.hf.model import HfModel

_PROMPT, _BESIDE = 32, 16
_STEPS = (13, 31, 32)
_TOLERANCE = 1e-3
"""The norm of the difference over that of the logits; float32 rounds to some 1e-6."""


@torch.no_grad()
def check(module: PreTrainedModel, model: HfModel) -> None:
    """Runs a prompt in two chunks and a single token, another one beside its first chunk. Raises ModelError where their
    logits are not those of transformers: then something is remembered, or attended to, that attention does not say.
    """
    name, vocabulary = module.config.model_type, model.spec.vocab_size
    # Spread over the vocabulary, so that the prompts say something.
    ids = torch.arange(1, _PROMPT + _BESIDE + 1) * 7919 % vocabulary
    length = min(_PROMPT, model.spec.context_length)
    prompt, beside = ids[:length], ids[_PROMPT:][:length]
    with _in_float32(module):
        expected = _plain_logits(module, prompt), _plain_logits(module, beside)
        try:
            found = _logits_in_steps(model, prompt, beside)
        except Exception as error:  # whatever the model's own code raises
            raise ModelError(f"the architecture {name!r} cannot be run in chunks: {error}") from error
    distance = max(float((ours - its).norm() / its.norm()) for ours, its in zip(found, expected, strict=True))
    if not distance <= _TOLERANCE:
        raise ModelError(
            f"the architecture {name!r} gives other results over our keys and values than in transformers "
            f"(by {distance:.1%}): it does not leave all that it remembers to its attention"
        )


def _plain_logits(module: PreTrainedModel, prompt: torch.Tensor) -> torch.Tensor:
    module.set_attn_implementation("eager")
    try:
        logits: torch.Tensor = module(input_ids=prompt[None], use_cache=False).logits
        return logits[0].float()
    finally:
        module.set_attn_implementation(NAME)


def _logits_in_steps(model: HfModel, prompt: torch.Tensor, beside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    attention = CpuAttention(model.spec.kv_shape(_PROMPT + _BESIDE, 1, torch.float32), model.spec.layers)
    pages = np.arange(_PROMPT + _BESIDE, dtype=np.int32)

    def step(*rows: tuple[torch.Tensor, AttentionRow]) -> torch.Tensor:
        attention.plan([row for _, row in rows])
        tokens = torch.cat([tokens[row.start : row.start + row.count] for tokens, row in rows])
        positions = torch.cat([torch.arange(row.start, row.start + row.count) for _, row in rows])
        return model.forward(tokens, positions, torch.arange(len(tokens)), attention)

    parts, start = [], 0
    for end in (min(end, len(prompt)) for end in _STEPS):
        rows = [(prompt, AttentionRow(0, pages, start, end - start, _PROMPT))] if end > start else []
        if start == 0:
            rows.append((beside, AttentionRow(1, pages[_PROMPT:], 0, len(beside), _BESIDE)))
        if rows:
            parts.append(step(*rows))
        start = end
    split = min(_STEPS[0], len(prompt))
    return torch.cat((parts[0][:split], *parts[1:])), parts[0][split:]


@contextmanager
def _in_float32(module: nn.Module) -> Iterator[None]:
    """Each layer computes in float32 while it runs and has its own weights before and after, so that rounding hides
    nothing, and the whole never has to fit into memory in float32."""
    kept: dict[nn.Module, list[tuple[nn.Parameter, torch.Tensor]]] = {}

    def widen(layer: nn.Module, *_: Any) -> None:
        # What is shared with a layer further out is wide already.
        narrow = [p for p in layer.parameters(recurse=False) if p.dtype != torch.float32]
        kept[layer] = [(parameter, parameter.data) for parameter in narrow]
        for parameter in narrow:
            parameter.data = parameter.data.float()

    def restore(layer: nn.Module, *_: Any) -> None:
        for parameter, data in kept.pop(layer, ()):
            parameter.data = data

    hooks = []
    for layer in module.modules():
        if any(parameter.dtype != torch.float32 for parameter in layer.parameters(recurse=False)):
            hooks += [layer.register_forward_pre_hook(widen), layer.register_forward_hook(restore, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
