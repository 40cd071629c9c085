"""From peft's tensors to updates of the decoder's fused layers.

an adapter of q_proj and v_proj     down of qkv     up of qkv
A_q [r, K]  B_q [Nq, r]             A_q             B_q.T   0    0
A_v [r, K]  B_v [Nv, r]             A_v             0       0    B_v.T
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine.adapters.adapter import Adapter, LowRank
from engine.adapters.peft import LoraConfig, read_config
from engine.config import AdapterSource
from engine.errors import ModelError
from engine.models.config import DecoderConfig
from engine.weights.convert import expected_shapes
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
            modules = [f"model.layers.{layer}.{part}" for part in parts]
            pairs = [_pair(config, left, module, shapes[f"{module}.weight"], model) for module in modules]
            if any(pair is not None for pair in pairs):
                sizes = [shapes[f"{module}.weight"][0] for module in modules]
                updates[f"layers.{layer}.{fused}"] = _fuse(pairs, sizes)
    if left:
        raise ModelError(f"{len(left)} tensors have no use, among them {min(left)}")
    if not updates:
        raise ModelError("target_modules names no linear layer of this model")
    return updates


def _pair(
    config: LoraConfig, left: dict[str, torch.Tensor], module: str, shape: tuple[int, ...], model: DecoderConfig
) -> LowRank | None:
    """Takes a module's two tensors out of `left`; None where the adapter does not target it."""
    if not config.targets(module):
        return None
    rank, prefix = config.rank_of(module), f"base_model.model.{module}"
    a = _take(left, f"{prefix}.lora_A.weight", (rank, shape[1]))
    b = _take(left, f"{prefix}.lora_B.weight", (shape[0], rank)) * config.scale_of(module)
    heads = {"q_proj": model.num_heads, "k_proj": model.num_kv_heads}.get(module.rpartition(".")[2])
    if heads is not None:  # the rows of the base weights were reordered in the same way
        b = interleave_rotary(b, heads, model.head_dim)
    return LowRank(a, b.t())


def _take(left: dict[str, torch.Tensor], name: str, shape: tuple[int, int]) -> torch.Tensor:
    tensor = left.pop(name, None)
    if tensor is None:
        raise ModelError(f"{name} is missing")
    if tuple(tensor.shape) != shape:
        raise ModelError(f"{name} has the shape {list(tensor.shape)}, and model and rank say {list(shape)}")
    if not bool(torch.isfinite(tensor).all()):
        raise ModelError(f"{name} has values that are not finite")
    return tensor


def _fuse(pairs: list[LowRank | None], sizes: list[int]) -> LowRank:
    """sizes: outputs of each part of the fused layer."""
    down = torch.cat([pair.down for pair in pairs if pair is not None])
    up = torch.zeros(len(down), sum(sizes))
    row = column = 0
    for pair, size in zip(pairs, sizes, strict=True):
        if pair is not None:
            up[row : row + len(pair.up), column : column + size] = pair.up
            row += len(pair.up)
        column += size
    return LowRank(down, up)
