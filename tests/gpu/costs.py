"""What a step of a decoder must read and multiply, at least: the measure of how well it was done.

Every weight is read once a step, however many rows it has, and every row's keys and values once. A multiplication and
the addition behind it are 2 FLOP. Norms, rotations and the softmax are left out: they are below 1 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BYTES = 2  # of a bfloat16 or float16


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder like Llama's, by default that of Mistral 7B (arXiv 2310.06825)."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    inner: int = 14336
    vocabulary: int = 32000

    @property
    def layer_weights(self) -> int:
        """Elements of the products of one layer: q, k and v; output; gate and up; down."""
        attention = self.hidden * (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return attention + 3 * self.hidden * self.inner

    @property
    def head_weights(self) -> int:
        """Elements of the product that gives the logits."""
        return self.hidden * self.vocabulary

    @property
    def weights(self) -> int:
        """Elements that a step reads."""
        return self.layers * self.layer_weights + self.head_weights

    def kv_bytes(self, tokens: int, element: int = BYTES) -> int:
        """Keys and values of so many tokens in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * tokens * element

    def decode_bytes(self, rows: int, context: int, element: int = BYTES, weight: int = BYTES) -> int:
        """Read by a step of single tokens, each with `context` keys, its own included. element: bytes of one of them.
        weight: of a layer's; the head has 16 bits."""
        weights = self.layers * self.layer_weights * weight + self.head_weights * BYTES
        return weights + self.kv_bytes(rows * context, element)

    def prefill_flops(self, prompts: Sequence[int]) -> int:
        """Of a step that computes whole prompts; each token sees itself and those before it."""
        pairs = sum(length * (length + 1) // 2 for length in prompts)
        products = 2 * self.layers * self.layer_weights * sum(prompts)
        attention = 4 * self.layers * self.heads * self.head_dim * pairs
        return products + attention + 2 * self.head_weights * len(prompts)


def own_layers(shape: Shape, free: int, for_weights: float = 0.6, weight: int = BYTES) -> int:
    """How many layers can have weights of their own in so many bytes of free memory; the others share them."""
    fixed = 2 * shape.head_weights * BYTES
    return max(1, min(shape.layers, int((free * for_weights - fixed) // (shape.layer_weights * weight))))


def stored_layers(shape: Shape, free: int, tokens: int, element: int = BYTES, for_kv: float = 0.85) -> int:
    """How many layers can have pages of their own for so many tokens; the others share them. 0: not one can."""
    return min(shape.layers, int(free * for_kv // (shape.kv_bytes(tokens, element) // shape.layers)))
