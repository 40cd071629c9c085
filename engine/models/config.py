"""The shape of a decoder, read from a Hugging Face config.json or from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ModelError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes in elements, context_length in tokens. rope_inv_freq_scale divides the rotary frequencies, one per pair."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_eps: float
    rope_theta: float
    rope_scaling: tuple[float, ...] | None = None
    tied_embeddings: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"rotary embeddings need an even head size, not {self.head_dim}")

    def kv_elements_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def inv_freq(self) -> npt.NDArray[np.float64]:
        """Rotary frequencies, [head_dim / 2], in radians per position (RoFormer, arXiv 2104.09864)."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        freqs = self.rope_theta**-exponents
        return freqs if self.rope_scaling is None else freqs / np.asarray(self.rope_scaling)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DecoderConfig:
        scaling = data.get("rope_scaling")
        return cls(**{**data, "rope_scaling": None if scaling is None else tuple(scaling)})


def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    """From the contents of config.json. Raises ModelError for architectures and options that are not supported."""
    model_type = str(config.get("model_type", ""))
    if model_type not in MODEL_TYPES:
        raise ModelError(f"the architecture {model_type!r} is not supported (these are: {', '.join(MODEL_TYPES)})")
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        context = int(config["max_position_embeddings"])
        if config.get("sliding_window") and config.get("use_sliding_window", model_type == "mistral"):
            context = min(context, int(config["sliding_window"]))  # inside the window, both attentions are the same
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(f"the activation {config['hidden_act']!r} is not supported")
        head_dim = int(config.get("head_dim") or hidden // heads)
        rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
        theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
        bias = bool(config.get("attention_bias", False))
        return DecoderConfig(
            model_type=model_type,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            context_length=context,
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=_rope_scaling(rope, head_dim, theta),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias or model_type == "qwen2",
            out_bias=bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=model_type == "qwen3",
        )
    except KeyError as missing:
        raise ModelError(f"config.json has no {missing}") from None
    except (TypeError, ValueError) as error:
        raise ModelError(f"config.json cannot be used: {error}") from None


def _rope_scaling(rope: Mapping[str, Any], head_dim: int, theta: float) -> tuple[float, ...] | None:
    """What to divide each frequency by: linear (position interpolation) or the Llama 3.1 rule."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return (float(rope["factor"]),) * (head_dim // 2)
    if kind != "llama3":
        raise ModelError(f"the rope scaling {kind!r} is not supported")
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    trained = float(rope["original_max_position_embeddings"])
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        # Short waves stay, long ones are interpolated, and in between the two are mixed.
        smooth = min(1.0, max(0.0, (trained / wavelength - low) / (high - low)))
        divisors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return tuple(divisors)


def from_gguf(metadata: Mapping[str, Any], tensor_names: set[str], rope_factors: Any | None) -> DecoderConfig:
    """From GGUF metadata; rope_factors is the `rope_freqs.weight` tensor where the file has one."""
    architecture = str(metadata.get("general.architecture", ""))
    if architecture not in MODEL_TYPES:
        raise ModelError(
            f"the GGUF architecture {architecture!r} is not supported (these are: {', '.join(MODEL_TYPES)})"
        )

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise ModelError(f"the GGUF file has no {architecture}.{key}")
        return value

    heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
    head_dim = int(get("attention.key_length", hidden // heads))
    context = int(get("context_length"))
    if window := int(get("attention.sliding_window", 0)):
        context = min(context, window)
    kind = str(get("rope.scaling.type", "none"))
    scaling = None
    if rope_factors is not None:
        scaling = tuple(float(f) for f in np.asarray(rope_factors).reshape(-1))
    elif kind == "linear":
        scaling = (float(get("rope.scaling.factor")),) * (head_dim // 2)
    elif kind != "none":
        raise ModelError(f"the rope scaling {kind!r} is not supported")
    return DecoderConfig(
        model_type=architecture,
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=int(get("feed_forward_length")),
        num_layers=int(get("block_count")),
        num_heads=heads,
        num_kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        context_length=context,
        rms_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope_theta=float(get("rope.freq_base", 10_000.0)),
        rope_scaling=scaling,
        tied_embeddings="output.weight" not in tensor_names,
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        out_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_down.bias" in tensor_names,
        qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
    )
