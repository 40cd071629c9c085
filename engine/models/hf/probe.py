"""What a loaded model asks of attention, found by running it; and a check that ours gives what its own gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from engine.attention import AttentionRow, LayerAttention, TorchAttention
from engine.errors import ModelError
from engine.models.base import ModelSpec
from engine.models.hf.interface import NAME
from engine.models.hf.model import HfModel, call

_CHECKED_TOKENS = 32
_PAGE = 4
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""The norm of the difference over that of the logits. Rounding in bfloat16 makes some hundredths."""

_UNSUPPORTED = {"attention_mask": "masks of its own", "s_aux": "attention sinks", "position_bias": "position biases"}


@dataclass(slots=True)
class _Recorder:
    """Notes what each layer asks for, and answers zeros."""

    options: list[LayerAttention] = field(default_factory=list)
    layers: list[int | None] = field(default_factory=list)
    shapes: set[tuple[int, int, int]] = field(default_factory=set)
    unsupported: set[str] = field(default_factory=set)

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: LayerAttention,
        extras: dict[str, Any],
    ) -> torch.Tensor:
        self.layers.append(layer)
        self.options.append(options)
        self.shapes.add((k.shape[1], k.shape[2], v.shape[2]))
        self.unsupported |= {what for name, what in _UNSUPPORTED.items() if extras.get(name) is not None}
        return q.new_zeros((*q.shape[:2], v.shape[2]))


def probe(module: PreTrainedModel, context_length: int) -> ModelSpec:
    """Runs one token and reads off the layers. Raises ModelError for what our keys and values cannot hold."""
    name, recorder = module.config.model_type, _Recorder()
    zero = torch.zeros(1, dtype=torch.int64)
    try:
        logits = call(module, zero, zero, recorder)
    except ModelError:
        raise
    except Exception as error:  # whatever the model's own code raises
        raise ModelError(f"the architecture {name!r} cannot be run over flat tokens: {error}") from error
    if recorder.layers != list(range(len(recorder.layers))) or not recorder.layers:
        raise ModelError(f"the architecture {name!r} does not attend once in each layer, through the interface")
    if recorder.unsupported:
        raise ModelError(f"the architecture {name!r} uses {min(recorder.unsupported)}, which are not supported")
    if len(recorder.shapes) > 1:
        raise ModelError(f"the architecture {name!r} has keys and values of different sizes in different layers")
    kv_heads, k_dim, v_dim = recorder.shapes.pop()
    if k_dim != v_dim:
        raise ModelError(f"the architecture {name!r} has keys of {k_dim} and values of {v_dim} elements: not supported")
    _check_windows(module, recorder.options)
    return ModelSpec(logits.shape[-1], context_length, kv_heads, k_dim, tuple(recorder.options))


def _check_windows(module: PreTrainedModel, options: list[LayerAttention]) -> None:
    """A model may leave its window to the mask, which we do not use: `sliding` is said here, and no window there."""
    kinds = getattr(module.config, "layer_types", None) or ()
    for kind, layer in zip(kinds, options, strict=False):
        if (kind == "sliding_attention") != (layer.window is not None):
            raise ModelError(f"the architecture {module.config.model_type!r} does not say its windows to its attention")


@torch.inference_mode()
def check(module: PreTrainedModel, model: HfModel) -> None:
    """Two prompts, in chunks and side by side, must get the logits that transformers alone gives. Raises ModelError."""
    name, spec = module.config.model_type, model.spec
    count = min(_CHECKED_TOKENS, spec.context_length)
    # Spread over the vocabulary, so that the prompts say something.
    ids = torch.arange(1, 2 * count + 1) * 7919 % spec.vocab_size
    prompts = ids[:count], ids[count : count + (count + 1) // 2]
    expected = _plain_logits(module, prompts)
    attention = TorchAttention(spec.kv_shape(2 * count, _PAGE, torch.float32), spec.layers)
    try:
        found = [_logits_in_chunks(model, attention, prompt, number) for number, prompt in enumerate(prompts)]
        beside = _logits_side_by_side(model, attention, prompts)
    except Exception as error:  # whatever the model's own code raises
        raise ModelError(f"the architecture {name!r} cannot be run in chunks: {error}") from error
    tolerance = _TOLERANCES[module.dtype]
    for ours in (found, beside):
        for part, whole in zip(ours, expected, strict=True):
            distance = float((part - whole).norm() / whole.norm())
            if not distance <= tolerance:
                raise ModelError(
                    f"the architecture {name!r} gives other results over our keys and values than in transformers "
                    f"(by {distance:.1%}): it does not leave all that it remembers to its attention"
                )


def _plain_logits(module: PreTrainedModel, prompts: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    module.set_attn_implementation("eager")
    try:
        return [module(input_ids=prompt[None], use_cache=False).logits[0].float() for prompt in prompts]
    finally:
        module.set_attn_implementation(NAME)


def _logits_in_chunks(model: HfModel, attention: TorchAttention, prompt: torch.Tensor, number: int) -> torch.Tensor:
    pages, parts, start = _pages(prompt, number), [], 0
    while start < len(prompt):
        count = min(start % 3 * 5 + 1, len(prompt) - start)
        attention.plan([AttentionRow(number, pages, start, count, len(prompt))])
        span = torch.arange(start, start + count)
        parts.append(model.forward(prompt[span], span, torch.arange(count), attention))
        start += count
    attention.drop(number)
    return torch.cat(parts)


def _logits_side_by_side(
    model: HfModel, attention: TorchAttention, prompts: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    rows = [AttentionRow(n, _pages(prompt, n), 0, len(prompt), len(prompt)) for n, prompt in enumerate(prompts)]
    attention.plan(rows)
    tokens = torch.cat(prompts)
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
    logits = model.forward(tokens, positions, torch.arange(len(tokens)), attention)
    return list(torch.split(logits, [len(prompt) for prompt in prompts]))


def _pages(prompt: torch.Tensor, number: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.arange(len(prompt), dtype=np.int32) + number * _CHECKED_TOKENS
