"""One compact decoder for the Llama family, over flat tokens: no batch dimension, no padding.

Norms first, residuals in between, rotary positions on queries and keys (adjacent pairs, as one complex product) and
SwiGLU. Which of biases, q/k norms, rope scaling, windows and layers without positions there are is in DecoderConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from engine.adapters.batch import Adapters
from engine.attention import AttentionBackend, LayerAttention
from engine.models.base import ModelSpec
from engine.models.config import DecoderConfig
from engine.models.rms_norm import RmsNorm
from engine.quant import DenseLinear, Linear
from engine.quant.linear import load_linear


@dataclass(frozen=True, slots=True)
class _Layer:
    rotary: bool
    attention_norm: RmsNorm
    qkv: Linear
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    out: Linear
    mlp_norm: RmsNorm
    gate_up: Linear
    down: Linear


class Decoder:
    """A decoder over converted tensors. Activations are in the dtype of dense weights, float32 beside packed ones."""

    def __init__(
        self, config: DecoderConfig, tensors: Mapping[str, torch.Tensor], adapters: Adapters | None = None
    ) -> None:
        self.config = config
        self._embedding = tensors["embedding"]
        packed = any(name.endswith(".int8") for name in tensors)
        self._adapters = adapters or Adapters()
        self._dtype = torch.float32 if packed else self._embedding.dtype
        self._norm = RmsNorm(tensors["norm"], config.rms_eps)
        tied = "lm_head.weight" not in tensors and "lm_head.int8" not in tensors
        self._head: Linear = DenseLinear(self._embedding) if tied else load_linear(tensors, "lm_head")
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # 8-bit weights are packed at load
            self._layers = tuple(threads.map(partial(self._layer, tensors), range(config.num_layers)))
        angles = np.outer(np.arange(config.context_length), config.rope.inv_freq(config.head_dim))
        magnitudes = torch.full(angles.shape, config.rope.magnitude)
        self._rotations = torch.polar(magnitudes, torch.from_numpy(angles.astype(np.float32)))

    @property
    def spec(self) -> ModelSpec:
        c = self.config
        layers = tuple(LayerAttention(window) for window in c.windows)
        return ModelSpec(c.vocab_size, c.context_length, c.num_kv_heads, c.head_dim, layers)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """See `Model.forward`."""
        x = F.embedding(tokens, self._embedding).to(self._dtype)
        rotations = self._rotations[positions][:, None]
        for index, layer in enumerate(self._layers):
            q, k, v = self._project(layer, layer.attention_norm(x), rotations)
            x.add_(layer.out(attention.run(index, q, k, v).flatten(1)))
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=-1)
            x.add_(layer.down(F.silu(gate).mul_(up)))
        if len(logit_rows) == 0:
            return torch.empty((0, self.config.vocab_size))
        return self._head(self._norm(x[logit_rows])).float()

    def _project(
        self, layer: _Layer, x: torch.Tensor, rotations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        c = self.config
        heads = layer.qkv(x).view(len(x), c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        rotated, v = heads[:, : -c.num_kv_heads], heads[:, -c.num_kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rotated[:, : c.num_heads], rotated[:, c.num_heads :]
            rotated = torch.cat((layer.q_norm(q), layer.k_norm(k)), dim=1)
        if not layer.rotary:
            return rotated[:, : c.num_heads], rotated[:, c.num_heads :], v
        pairs = torch.view_as_complex(rotated.float().reshape(*rotated.shape[:2], -1, 2))
        rotated = torch.view_as_real(pairs * rotations).flatten(2).to(x.dtype)
        return rotated[:, : c.num_heads], rotated[:, c.num_heads :], v

    def _layer(self, tensors: Mapping[str, torch.Tensor], index: int) -> _Layer:
        prefix = f"layers.{index}."

        def norm(name: str) -> RmsNorm:
            return RmsNorm(tensors[prefix + name], self.config.rms_eps)

        def linear(name: str) -> Linear:
            return self._adapters.adapt(prefix + name, load_linear(tensors, prefix + name), self._dtype)

        has_qk_norm = self.config.qk_norm
        return _Layer(
            rotary=self.config.rotary[index],
            attention_norm=norm("attention_norm"),
            qkv=linear("qkv"),
            q_norm=norm("q_norm") if has_qk_norm else None,
            k_norm=norm("k_norm") if has_qk_norm else None,
            out=linear("out"),
            mlp_norm=norm("mlp_norm"),
            gate_up=linear("gate_up"),
            down=linear("down"),
        )
