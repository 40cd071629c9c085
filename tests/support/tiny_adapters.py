"""Random LoRA adapters in peft's folders, and the same ones merged into a transformers model."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "somewhere/tiny",
    "inference_mode": True,
    "bias": "none",
    "init_lora_weights": True,
    "lora_dropout": 0.05,
    "modules_to_save": None,
    "use_dora": False,
    "fan_in_fan_out": False,
    "loftq_config": {},
    "megatron_core": "megatron.core",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": list(ALL),
}


def random_tensors(
    model: PreTrainedModel,
    ranks: Mapping[str, int],
    *,
    seed: int = 0,
    size: float = 0.2,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """A and B of every module of `ranks`, under peft's names; of such a size that every logit changes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, rank in ranks.items():
        rows, columns = model.get_submodule(module).weight.shape
        prefix = f"base_model.model.{module}"
        tensors[f"{prefix}.lora_A.weight"] = (torch.randn(rank, columns, generator=generator) * size).to(dtype)
        tensors[f"{prefix}.lora_B.weight"] = (torch.randn(rows, rank, generator=generator) * size).to(dtype)
    return tensors


def layers_of(model: PreTrainedModel, *projections: str) -> list[str]:
    """The full names of these projections in every layer."""
    return [name for name, _ in model.named_modules() if name.rpartition(".")[2] in projections]


def save_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}), encoding="utf-8")
    save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def save_random(folder: Path, model: PreTrainedModel, *, seed: int, size: float = 0.2) -> PreTrainedModel:
    """Writes an adapter of rank 4 on all linear layers and gives the model with it merged."""
    modules = layers_of(model, *ALL)
    tensors = random_tensors(model, dict.fromkeys(modules, 4), seed=seed, size=size)
    save_adapter(folder, tensors)
    return merged(model, tensors, dict.fromkeys(modules, 2.0))


def merged(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], scales: Mapping[str, float]) -> PreTrainedModel:
    """A copy of the model with W + scale * B @ A in the modules of `scales`."""
    result = copy.deepcopy(model)
    with torch.no_grad():
        for module, scale in scales.items():
            a, b = (tensors[f"base_model.model.{module}.lora_{part}.weight"].float() for part in "AB")
            result.get_submodule(module).weight += scale * (b @ a)
    return result
