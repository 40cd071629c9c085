"""From peft's tensors to updates of the decoder's fused layers.

    q_proj  A [r, K]  B [Nq, r]     down  A of q_proj     parts  ranks 0 : r      columns 0 : Nq
    v_proj  A [s, K]  B [Nv, s]           A of v_proj            ranks r : r + s  columns Nq + Nk : Nq + Nk + Nv

Every target has both tensors in the shapes that the model and the ranks say, and no tensor is left over.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine.adapters.adapter import Adapter, LowRank, Part
from engine.adapters.peft import LoraConfig, read_config
from engine.config import AdapterSource
from engine.errors import ModelError
from engine.models.config import DecoderConfig
from engine.models.shapes import expected_shapes
from engine.weights.tensors import interleave_rotary

WEIGHTS_FILE = "adapter_model.safetensors"

_FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def load_adapter(source: AdapterSource, model: DecoderConfig) -> Adapter:
    """Reads the folder of an adapter that was trained on this model, in float32. Raises ModelError."""
    try:
        config = read_config(source.path)
        return Adapter(source.name, _updates(config, _read_tensors(source.path), model))
    except ModelError as error:
        raise ModelError(f"the adapter {source.name}: {error}") from None


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise ModelError(f"{folder} has no {WEIGHTS_FILE} (other weight formats are not read)")
    try:
        return {name: tensor.float() for name, tensor in load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a usable safetensors file: {error}") from None


def _updates(config: LoraConfig, tensors: Mapping[str, torch.Tensor], model: DecoderConfig) -> dict[str, LowRank]:
    shapes = expected_shapes(model)
    for name in ("lm_head", "model.embed_tokens"):
        if config.targets(name):
            raise ModelError(f"target_modules has {name}, whose update is not supported")
    left = dict(tensors)
    updates: dict[str, LowRank] = {}
    for layer in range(model.num_layers):
        for fused, parts in _FUSED.items():
            modules = {name: shapes[f"{name}.weight"] for name in (f"model.layers.{layer}.{part}" for part in parts)}
            if (update := _fused(config, left, modules, model)) is not None:
                updates[f"layers.{layer}.{fused}"] = update
    if left:
        raise ModelError(f"{len(left)} tensors have no use, among them {min(left)}")
    if not updates:
        raise ModelError("target_modules names no linear layer of this model")
    return updates


def _fused(
    config: LoraConfig, left: dict[str, torch.Tensor], modules: Mapping[str, tuple[int, ...]], model: DecoderConfig
) -> LowRank | None:
    """The update of the layer that `modules` (name to weight shape) were fused into; None where none is a target.

    Takes what it uses out of `left`.
    """
    down: list[torch.Tensor] = []
    parts: list[Part] = []
    column = rank = 0
    for module, (rows, columns) in modules.items():
        if config.targets(module):
            r, prefix = config.rank_of(module), f"base_model.model.{module}"
            down.append(_take(left, f"{prefix}.lora_A.weight", (r, columns)))
            b = _take(left, f"{prefix}.lora_B.weight", (rows, r)) * config.scale_of(module)
            up = _in_row_order(b, module, model).t().contiguous()
            parts.append(Part(slice(rank, rank + r), slice(column, column + rows), up))
            rank += r
        column += rows
    return LowRank(torch.cat(down), tuple(parts)) if parts else None


def _in_row_order(b: torch.Tensor, module: str, model: DecoderConfig) -> torch.Tensor:
    """The rows of q and k reordered as those of the base weights were."""
    heads = {"q_proj": model.num_heads, "k_proj": model.num_kv_heads}.get(module.rpartition(".")[2])
    return b if heads is None else interleave_rotary(b, heads, model.head_dim)


def _take(left: dict[str, torch.Tensor], name: str, shape: tuple[int, int]) -> torch.Tensor:
    tensor = left.pop(name, None)
    if tensor is None:
        raise ModelError(f"{name} is missing")
    if tuple(tensor.shape) != shape:
        raise ModelError(f"{name} has the shape {list(tensor.shape)}, and model and rank say {list(shape)}")
    if not bool(torch.isfinite(tensor).all()):
        raise ModelError(f"{name} has values that are not finite")
    return tensor
