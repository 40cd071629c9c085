"""The shape of a compact decoder from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.errors import ModelError
from engine.models.config import FAMILIES, DecoderConfig
from engine.models.rope import Rope, scaled_rope


def from_gguf(metadata: Mapping[str, Any], tensor_names: set[str], rope_factors: Any | None) -> DecoderConfig:
    """rope_factors is the `rope_freqs.weight` tensor where the file has one. Raises ModelError, and KeyError where the
    file has no vocabulary."""
    architecture = str(metadata.get("general.architecture", ""))
    if architecture not in FAMILIES:
        raise ModelError(f"the GGUF architecture {architecture!r} is not supported (these are: {', '.join(FAMILIES)})")

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise ModelError(f"the GGUF file has no {architecture}.{key}")
        return value

    heads, hidden, layers = int(get("attention.head_count")), int(get("embedding_length")), int(get("block_count"))
    head_dim = int(get("attention.key_length", hidden // heads))
    window = int(get("attention.sliding_window", 0)) or None
    if architecture not in ("llama", "mistral"):
        window = None  # the file does not say which layers would use it, and published Qwen models do not
    return DecoderConfig(
        model_type=architecture,
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=int(get("feed_forward_length")),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        context_length=int(get("context_length")),
        rms_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope=_rope(get, head_dim, rope_factors),
        windows=(window,) * layers,
        rotary=tuple(architecture != "smollm3" or (layer + 1) % 4 != 0 for layer in range(layers)),
        tied_embeddings="output.weight" not in tensor_names,
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        out_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_down.bias" in tensor_names,
        qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
    )


def _rope(get: Any, head_dim: int, factors: Any | None) -> Rope:
    theta = float(get("rope.freq_base", 10_000.0))
    if factors is not None:
        return Rope(theta, tuple(float(factor) for factor in np.asarray(factors).reshape(-1)))
    kind = str(get("rope.scaling.type", "none"))
    if kind == "none":
        return Rope(theta)
    context = int(get("context_length"))
    options = {
        "factor": float(get("rope.scaling.factor", 1.0)),
        "original_max_position_embeddings": int(get("rope.scaling.original_context_length", context)),
        "beta_fast": get("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": get("rope.scaling.yarn_beta_slow", 1.0),
    }
    return scaled_rope(kind, options, head_dim, theta, context)
