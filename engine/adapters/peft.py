"""adapter_config.json as peft writes it: which modules have an update, of which rank and scale."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import ModelError

CONFIG_FILE = "adapter_config.json"

_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Fields that say where an adapter comes from, how it was trained, or how a feature works that is off."""

_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base weights as they are; the others belong to changed base weights."""

Names = str | tuple[str, ...]
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """A module is named as in the Hugging Face model: model.layers.0.self_attn.q_proj.

    target_modules, exclude_modules: a regular expression for the whole name, or the ends of names.
    rank_pattern, alpha_pattern: regular expressions for the ends of names; the first that fits wins.
    """

    rank: int
    alpha: float
    use_rslora: bool
    target_modules: Names
    exclude_modules: Names
    layers: frozenset[int] | None
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def targets(self, module: str) -> bool:
        if self.exclude_modules and _named(self.exclude_modules, module):
            return False
        if not _named(self.target_modules, module):
            return False
        if self.layers is None or module in self.target_modules:
            return True
        layer = re.match(r".*\.layers\.(\d+)\.", module)
        return layer is not None and int(layer[1]) in self.layers

    def rank_of(self, module: str) -> int:
        return _pattern_value(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What B @ A is multiplied with: alpha / r, or alpha / sqrt(r) with use_rslora (arXiv 2312.03732)."""
        rank = self.rank_of(module)
        return _pattern_value(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def read_config(folder: Path) -> LoraConfig:
    """Raises ModelError, which names the field, for whatever cannot be used or would be ignored."""
    path = folder / CONFIG_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder} has no {CONFIG_FILE}: an adapter is a folder as peft saves it") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} cannot be used: it holds no object")
    try:
        return _parse(data)
    except (ModelError, TypeError, ValueError, AttributeError, re.error) as error:
        raise ModelError(f"{path} cannot be used: {error}") from None


def _parse(given: Mapping[str, Any]) -> LoraConfig:
    data = dict(given)
    if (kind := data.pop("peft_type", None)) != "LORA":
        raise ModelError(f"peft_type is {kind!r}, and only LORA is supported")
    if (bias := data.pop("bias", "none")) != "none":
        raise ModelError(f"bias {bias!r} is not supported")
    if (start := data.pop("init_lora_weights", True)) not in _PLAIN_STARTS:
        raise ModelError(f"init_lora_weights {start!r} is not supported: it belongs to base weights of its own")
    target_modules = data.pop("target_modules", None)
    if not target_modules:
        raise ModelError("target_modules names no modules")
    layers = _layers(data.pop("layers_to_transform", None))
    if layers is not None and isinstance(target_modules, str):
        raise ModelError("layers_to_transform needs a list of target_modules")
    if data.pop("layers_pattern", None) not in (None, "", "layers", [], ["layers"]):
        raise ModelError("layers_pattern is not supported, other than 'layers'")
    config = LoraConfig(
        rank=_rank(data.pop("r", 8)),
        alpha=_alpha(data.pop("lora_alpha", 8)),
        use_rslora=bool(data.pop("use_rslora", False)),
        target_modules=_names(target_modules),
        exclude_modules=_names(data.pop("exclude_modules", None) or ()),
        layers=layers,
        rank_pattern={str(k): _rank(v) for k, v in (data.pop("rank_pattern", None) or {}).items()},
        alpha_pattern={str(k): _alpha(v) for k, v in (data.pop("alpha_pattern", None) or {}).items()},
    )
    for name, value in data.items():
        if value and name not in _WITHOUT_EFFECT:
            raise ModelError(f"{name} is not supported")
    _try_patterns(config)
    return config


def _rank(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"a rank is a whole number from 1 on, not {value!r}")
    return value


def _alpha(value: object) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"lora_alpha is a finite number, not {value!r}")
    return float(value)


def _names(value: object) -> Names:
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise ModelError("modules are named by a string or a list of strings")


def _layers(value: object) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    layers = value if isinstance(value, list) else [value]
    if not all(isinstance(layer, int) for layer in layers):
        raise ModelError("layers_to_transform is a whole number or a list of them")
    return frozenset(layers)


def _try_patterns(config: LoraConfig) -> None:
    """Raises re.error for a pattern that is none, which would otherwise depend on the names it meets."""
    regular = [names for names in (config.target_modules, config.exclude_modules) if isinstance(names, str)]
    for pattern in (*regular, *config.rank_pattern, *config.alpha_pattern):
        re.compile(f"({pattern})")


def _named(names: Names, module: str) -> bool:
    if isinstance(names, str):
        if names.lower() == "all-linear":
            return module != "lm_head" and not module.endswith("embed_tokens")
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _pattern_value(patterns: Mapping[str, Number], module: str, default: Number) -> Number:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)
