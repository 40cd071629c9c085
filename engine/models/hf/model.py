"""A causal LM of transformers over flat tokens, whose keys and values live in our attention backend."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.attention import AttentionBackend, LayerAttention
from engine.models.base import ModelSpec
from engine.models.hf.interface import Attend


class HfModel:
    """Implements `Model`. The module must attend through `interface.NAME` and be as `spec` says."""

    def __init__(self, module: PreTrainedModel, spec: ModelSpec) -> None:
        self.module = module
        self._spec = spec
        self._keeps_rows = "logits_to_keep" in inspect.signature(module.forward).parameters

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def to(self, device: torch.device) -> HfModel:
        """The same model, on another device."""
        return HfModel(self.module.to(device), self._spec)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """See `Model.forward`."""

        def attend(
            layer: int,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            options: LayerAttention,
            extras: dict[str, Any],
        ) -> torch.Tensor:
            return attention.run(layer, q, k, v)  # which knows the options from the spec

        # The products of the head want at least one row.
        rows = logit_rows if len(logit_rows) else torch.zeros(1, dtype=torch.int64, device=tokens.device)
        logits = call(self.module, tokens, positions, attend, **({"logits_to_keep": rows} if self._keeps_rows else {}))
        return (logits if self._keeps_rows else logits[rows])[: len(logit_rows)].float()


def call(
    module: PreTrainedModel, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, **options: Any
) -> torch.Tensor:
    """One forward pass over flat tokens, [T]; gives [T or rows to keep, vocab]."""
    output = module(
        input_ids=tokens[None], position_ids=positions[None], use_cache=False, chatd_attend=attend, **options
    )
    logits: torch.Tensor = output.logits
    return logits[0]
