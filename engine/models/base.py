"""What the engine asks of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention import AttentionBackend, KVShape, LayerAttention


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a model needs around it: sizes in elements, context_length in tokens, and the attention of each layer.

    num_heads: of queries; num_kv_heads: of keys and of values. static: the same number of tokens is always computed by
    the same operations, none of which waits for the device, so that a CUDA graph may replay them.
    """

    vocab_size: int
    context_length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerAttention, ...]
    static: bool = False

    def token_bytes(self, dtype: torch.dtype) -> int:
        """What the keys and values of a token take, kept in that type."""
        return self.kv_shape(1, 1, dtype).page_bytes

    def kv_shape(self, num_pages: int, page_size: int, dtype: torch.dtype) -> KVShape:
        return KVShape(len(self.layers), self.num_kv_heads, self.head_dim, num_pages, page_size, dtype)


class Model(Protocol):
    """A causal language model over flat tokens, whose keys and values live in the attention backend."""

    @property
    def spec(self) -> ModelSpec: ...

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """Logits, [R, vocab] float32, of the R rows of the step that `logit_rows` names, on the model's device.

        All are on that device. tokens and positions: [T] int64, the step for which `attention` was planned.
        logit_rows: [R] int64 indices into T; R may be 0.
        """
        ...
