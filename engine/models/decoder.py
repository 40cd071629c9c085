"""One compact decoder for the Llama family, over flat tokens: no batch dimension, no padding.

Norms first, residuals in between, rotary positions on queries and keys (adjacent pairs) and SwiGLU. Which of biases,
q/k norms, rope scaling, windows and layers without positions there are is in DecoderConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
import torch.nn.functional as F

from engine.adapters.batch import Adapters
from engine.attention import AttentionBackend, CpuAttention, LayerAttention
from engine.kernels import Heads, Products
from engine.models.base import ModelSpec
from engine.models.config import DecoderConfig
from engine.models.elementwise import CpuElementwise, Elementwise, RowNorm
from engine.models.layer import DecoderLayer, add, add_gated, after_norm
from engine.models.watch import Watch
from engine.models.whole_step import WholeStep
from engine.quant import DenseLinear, Linear, load_linear


class Decoder:
    """A decoder over converted tensors. The residual is in the dtype of dense weights, float32 beside packed ones.

    All tensors, those of `forward` included, are on one device. watch: measures the parts of each step. elementwise:
    for that device; None: for the CPU.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Mapping[str, torch.Tensor],
        adapters: Adapters | None = None,
        watch: Watch | None = None,
        elementwise: Elementwise | None = None,
    ) -> None:
        self.config = config
        self._elementwise = elementwise or CpuElementwise()
        self._embedding = tensors["embedding"]
        packed = any(name.endswith(".packed") for name in tensors)
        self._dtype = torch.float32 if packed else self._embedding.dtype
        self._watch = watch
        self._rotations = _rotations(config).to(self._embedding.device)
        products = Products()
        self._layers = tuple(
            self._layer(tensors, index, adapters or Adapters(), products) for index in range(config.num_layers)
        )
        self._joins = WholeStep.fits(self._layers)
        self._whole: WholeStep | None = None
        tied = "lm_head.weight" not in tensors and "lm_head.packed" not in tensors
        self._norm = self._elementwise.norm(tensors["norm"], config.rms_eps)
        self._head: Linear = DenseLinear(self._embedding) if tied else load_linear(tensors, "lm_head", products)

    @property
    def spec(self) -> ModelSpec:
        c = self.config
        layers = tuple(LayerAttention(window) for window in c.windows)
        return ModelSpec(c.vocab_size, c.context_length, c.num_heads, c.num_kv_heads, c.head_dim, layers, static=True)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """See `Model.forward`."""
        x = F.embedding(tokens, self._embedding).to(self._dtype)
        if self._joins and isinstance(attention, CpuAttention):
            x = self._in_one_go(x, positions, attention)
        else:
            self._one_by_one(x, positions, attention)
        if len(logit_rows) == 0:
            return torch.empty((0, self.config.vocab_size), device=x.device)
        with self._measure("lm_head"):
            return after_norm(self._norm, self._head, x[logit_rows]).float()

    def _in_one_go(self, x: torch.Tensor, positions: torch.Tensor, attention: CpuAttention) -> torch.Tensor:
        whole = self._whole
        if whole is None or whole.attention is not attention or whole.most_rows < len(x):
            most_rows = 1 << max(4, (len(x) - 1).bit_length())
            self._whole = whole = WholeStep(self.config, self._layers, attention, most_rows)
        whole.x[: len(x)] = x
        return whole.run(positions, self._watch)

    def _one_by_one(self, x: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> None:
        """All layers, in x."""
        measure = self._measure
        for index, layer in enumerate(self._layers):
            with measure("qkv"):
                qkv = after_norm(layer.attention_norm, layer.qkv, x)
            with measure("heads"):
                q, k, v = layer.heads(qkv, positions)
            with measure("attention"):
                attended = attention.run(index, q, k, v).flatten(1)
            with measure("out"):
                add(layer.out, attended, x)
            with measure("gate_up"):
                gate_up = after_norm(layer.mlp_norm, layer.gate_up, x)
            with measure("down"):
                add_gated(layer.down, gate_up, x, self._elementwise)

    def _measure(self, part: str) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch.measure(part)

    def _layer(
        self, tensors: Mapping[str, torch.Tensor], index: int, adapters: Adapters, products: Products
    ) -> DecoderLayer:
        c, prefix = self.config, f"layers.{index}."

        def norm(name: str) -> RowNorm:
            return self._elementwise.norm(tensors[prefix + name], c.rms_eps)

        def linear(name: str) -> Linear:
            return adapters.adapt(prefix + name, load_linear(tensors, prefix + name, products), self._dtype)

        return DecoderLayer(
            attention_norm=norm("attention_norm"),
            qkv=linear("qkv"),
            heads=self._elementwise.heads(
                Heads(
                    c.num_heads,
                    c.num_kv_heads,
                    self._rotations if c.rotary[index] else None,
                    norm("q_norm").norm if c.qk_norm else None,
                    norm("k_norm").norm if c.qk_norm else None,
                )
            ),
            out=linear("out"),
            mlp_norm=norm("mlp_norm"),
            gate_up=linear("gate_up"),
            down=linear("down"),
        )


def _rotations(config: DecoderConfig) -> torch.Tensor:
    """Cosine and sine of each pair of a head at each position: float32 [context_length, head_dim / 2, 2]."""
    angles = np.outer(np.arange(config.context_length), config.rope.inv_freq(config.head_dim))
    turns = config.rope.magnitude * np.stack((np.cos(angles), np.sin(angles)), axis=-1)
    return torch.from_numpy(turns.astype(np.float32))
