"""The shape of a compact decoder, and which Hugging Face configurations have one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from engine.errors import ModelError
from engine.models.rope import ROPE_TYPES, Rope, scaled_rope


@dataclass(frozen=True, slots=True)
class _Family:
    """What config.json of this model_type leaves out means."""

    rope_theta: float = 10_000.0
    tied: bool = False
    head_dim: int | None = None
    window: int | None = None


FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(window=4096),
    "qwen2": _Family(window=4096),
    "qwen3": _Family(head_dim=128, window=4096),
    "smollm3": _Family(rope_theta=2_000_000.0, tied=True),
}


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes in elements, context_length in tokens. windows and rotary: one entry for each layer; the window of a layer
    in tokens (None: all of them), and whether it rotates queries and keys."""

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
    rope: Rope
    windows: tuple[int | None, ...]
    rotary: tuple[bool, ...]
    tied_embeddings: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "context_length"):
            if getattr(self, name) < 1:
                raise ModelError(f"the configuration says {name} = {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"rotary embeddings need an even head size, not {self.head_dim}")
        for name, entries in (("windows", self.windows), ("rotary layers", self.rotary)):
            if len(entries) != self.num_layers:
                raise ModelError(f"the configuration has {len(entries)} {name} for {self.num_layers} layers")
        if any(window is not None and window < 1 for window in self.windows):
            raise ModelError("a sliding window must hold at least 1 token")
        if self.rope.divisors is not None and len(self.rope.divisors) != self.head_dim // 2:
            raise ModelError(f"{len(self.rope.divisors)} rope factors for {self.head_dim // 2} pairs")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DecoderConfig:
        lists = {name: tuple(data[name]) for name in ("windows", "rotary")}
        return cls(**{**data, **lists, "rope": Rope.from_json(data["rope"])})


def is_compact(config: Mapping[str, Any]) -> bool:
    """Whether the contents of a config.json describe what the compact decoder computes. Raises ModelError where they
    are not even of the right types."""
    rope = _rope_options(config)
    return (
        str(config.get("model_type")) in FAMILIES
        and config.get("hidden_act", "silu") == "silu"
        and _rope_kind(rope) in ROPE_TYPES
        and (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) == 1.0
    )


def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    """From the contents of config.json. Raises ModelError for architectures and options that are not supported."""
    model_type = str(config.get("model_type", ""))
    if model_type not in FAMILIES:
        raise ModelError(f"the architecture {model_type!r} is not supported (these are: {', '.join(FAMILIES)})")
    if not is_compact(config):
        raise ModelError(f"this {model_type} has an activation or rotary positions that are not supported")
    family = FAMILIES[model_type]
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        context, layers = int(config["max_position_embeddings"]), int(config["num_hidden_layers"])
        head_dim = int(config.get("head_dim") or family.head_dim or hidden // heads)
        rope = _rope_options(config)
        theta = float(rope.get("rope_theta") or config.get("rope_theta") or family.rope_theta)
        rotary = _rotary_layers(config, model_type, layers)
        bias = bool(config.get("attention_bias", False))
        return DecoderConfig(
            model_type=model_type,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            context_length=context,
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=scaled_rope(_rope_kind(rope), rope, head_dim, theta, context),
            windows=_windows(config, model_type, layers, rotary),
            rotary=rotary,
            tied_embeddings=bool(config.get("tie_word_embeddings", family.tied)),
            qkv_bias=bias or model_type == "qwen2",
            out_bias=bias and model_type != "qwen2",
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=model_type == "qwen3",
        )
    except KeyError as missing:
        raise ModelError(f"config.json has no {missing}") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"config.json cannot be used: {error}") from None


def _rope_options(config: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name) or {}
        if not isinstance(given, Mapping):
            raise ModelError(f"config.json cannot be used: {name} is no object")
        options |= given
    return options


def _rope_kind(rope: Mapping[str, Any]) -> str:
    if any(isinstance(value, dict) for value in rope.values()):
        return "one for each kind of layer"
    return str(rope.get("rope_type", rope.get("type", "default")))


def _rotary_layers(config: Mapping[str, Any], model_type: str, layers: int) -> tuple[bool, ...]:
    """SmolLM3 leaves positions out in every fourth layer (NoPE, arXiv 2501.18795)."""
    if model_type != "smollm3":
        return (True,) * layers
    if (listed := config.get("no_rope_layers")) is not None:
        return tuple(bool(rotates) for rotates in listed[:layers])
    interval = int(config.get("no_rope_layer_interval", 4))
    return tuple((layer + 1) % interval != 0 for layer in range(layers))


def _windows(
    config: Mapping[str, Any], model_type: str, layers: int, rotary: tuple[bool, ...]
) -> tuple[int | None, ...]:
    """Which layers see only a window: listed in layer_types, else by the rule of the family."""
    window = config.get("sliding_window", FAMILIES[model_type].window)
    if model_type == "llama" or not window or not config.get("use_sliding_window", model_type == "mistral"):
        return (None,) * layers
    if (kinds := config.get("layer_types")) is not None:
        if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
            raise ModelError(f"the layer type {min(unknown)!r} is not supported")
        slides = [kind == "sliding_attention" for kind in kinds]
    elif model_type == "mistral":
        slides = [True] * layers
    elif model_type == "smollm3":
        slides = [not rotates for rotates in rotary]
    else:
        first = int(config.get("max_window_layers", 28))
        slides = [layer >= first for layer in range(layers)]
    return tuple(int(window) if slide else None for slide in slides)
