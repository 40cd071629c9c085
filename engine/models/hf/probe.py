"""What a loaded model asks of attention, found by running it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.attention import LayerAttention
from engine.errors import ModelError
from engine.models.base import ModelSpec
from engine.models.hf.model import call

_UNSUPPORTED = {"attention_mask": "masks of its own", "s_aux": "attention sinks", "position_bias": "position biases"}


@dataclass(slots=True)
class _Recorder:
    """Notes what each layer asks for, and answers zeros."""

    options: list[LayerAttention] = field(default_factory=list)
    layers: list[int | None] = field(default_factory=list)
    shapes: set[tuple[int, int, int, int]] = field(default_factory=set)
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
        self.shapes.add((q.shape[1], k.shape[1], k.shape[2], v.shape[2]))
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
        raise ModelError(f"the architecture {name!r} has heads of different sizes or numbers in its layers")
    heads, kv_heads, k_dim, v_dim = recorder.shapes.pop()
    if k_dim != v_dim:
        raise ModelError(f"the architecture {name!r} has keys of {k_dim} and values of {v_dim} elements: not supported")
    _check_windows(module, recorder.options)
    return ModelSpec(logits.shape[-1], context_length, heads, kv_heads, k_dim, tuple(recorder.options))


def _check_windows(module: PreTrainedModel, options: list[LayerAttention]) -> None:
    """A model may leave its window to the mask, which we do not use: `sliding` is said here, and no window there."""
    kinds = getattr(module.config, "layer_types", None) or ()
    for kind, layer in zip(kinds, options, strict=False):
        if (kind == "sliding_attention") != (layer.window is not None):
            raise ModelError(f"the architecture {module.config.model_type!r} does not say its windows to its attention")
