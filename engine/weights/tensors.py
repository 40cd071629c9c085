"""One view of a model's tensors, whatever the file format: Hugging Face names, float32, interleaved rotary pairs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelError
from engine.kernels.products import GROUP
from engine.models.config import DecoderConfig
from engine.quant import GroupedWeight

if TYPE_CHECKING:
    from gguf import GGUFReader


class TensorSource(Protocol):
    """Reads tensors by their Hugging Face names."""

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dense(self, name: str) -> torch.Tensor:
        """float32, in the shape of the Hugging Face model."""
        ...

    def grouped_4bit(self, name: str) -> GroupedWeight | None:
        """The weight exactly as stored in groups of 4 bits; None where it is stored in another way."""
        ...


def interleave_rotary(tensor: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """Reorders the rows of each head from (first halves, second halves) to adjacent pairs.

    Attention scores do not change when queries and keys are permuted alike, and a rotation of adjacent pairs is one
    complex product.
    """
    shape = tensor.shape
    return tensor.view(heads, 2, head_dim // 2, -1).transpose(1, 2).reshape(shape)


class SafetensorsSource:
    """The *.safetensors of a folder, sharded or not."""

    def __init__(self, folder: Path, config: DecoderConfig) -> None:
        self._config = config
        self._files = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = safe_open(str(path), framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is not a usable safetensors file: {error}") from None
            self._files.update(dict.fromkeys(file.keys(), file))

    def names(self) -> set[str]:
        return {name for name in self._files if not name.endswith("rotary_emb.inv_freq")}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def dense(self, name: str) -> torch.Tensor:
        tensor = self._files[name].get_tensor(name).float()
        heads = _rotary_heads(name, self._config)
        return tensor if heads is None else interleave_rotary(tensor, heads, self._config.head_dim)

    def grouped_4bit(self, name: str) -> GroupedWeight | None:
        return None


_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


_INTERLEAVED = ("llama", "mistral", "smollm3")
"""The architectures in whose GGUF files the rows of q and k are interleaved already."""


class GgufTensors:
    """The tensors of a GGUF file."""

    def __init__(self, reader: GGUFReader, config: DecoderConfig) -> None:
        self._config = config
        self._tensors: dict[str, Any] = {}
        for tensor in reader.tensors:
            if (name := _hf_name(tensor.name)) is not None:
                self._tensors[name] = tensor

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def dense(self, name: str) -> torch.Tensor:
        from gguf import quants  # see read_gguf

        tensor = self._tensors[name]
        try:
            values = quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ModelError(f"{tensor.name} has the type {tensor.tensor_type.name}, which is not supported") from None
        dense = torch.from_numpy(np.array(values, dtype=np.float32)).view(self.shape(name))
        return self._reorder(name)(dense)

    def grouped_4bit(self, name: str) -> GroupedWeight | None:
        tensor = self._tensors[name]
        if tensor.tensor_type.name not in ("Q4_0", "Q4_1"):
            return None
        columns, rows = (int(n) for n in tensor.shape)
        has_minimum = tensor.tensor_type.name == "Q4_1"
        blocks = np.asarray(tensor.data).reshape(rows, columns // GROUP, (20 if has_minimum else 18))
        nibbles = blocks[..., -16:]
        u = np.concatenate((nibbles & 15, nibbles >> 4), axis=-1).reshape(rows, columns)
        # Q4_1 is d * u + m, Q4_0 is d * (u - 8).
        scale = blocks[..., :2].copy().view(np.float16)[..., 0]
        least = blocks[..., 2:4].copy().view(np.float16)[..., 0] if has_minimum else scale * np.float16(-8)
        reorder = self._reorder(name)
        return GroupedWeight(4, *(reorder(torch.from_numpy(each)) for each in (u, scale, least)))

    def _reorder(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        heads = _rotary_heads(name, self._config)
        if heads is None or self._config.model_type in _INTERLEAVED:
            return lambda tensor: tensor
        return lambda tensor: interleave_rotary(tensor, heads, self._config.head_dim)


def _hf_name(name: str) -> str | None:
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    if name == "rope_freqs.weight":
        return None  # already part of the configuration
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _GGUF_LAYER:
        return name  # kept, so that the check for unused tensors names it
    return f"model.layers.{match[1]}.{_GGUF_LAYER[match[2]]}.{match[3]}"


def _rotary_heads(name: str, config: DecoderConfig) -> int | None:
    if ".q_proj." in name:
        return config.num_heads
    if ".k_proj." in name:
        return config.num_kv_heads
    return 1 if name.endswith(("q_norm.weight", "k_norm.weight")) else None


def read_gguf(path: Path) -> GGUFReader:
    from gguf import GGUFReader  # only conversion needs it, and it takes a while to load

    try:
        return GGUFReader(path)
    except Exception as error:  # the reader raises whatever the damaged bytes lead to
        raise ModelError(f"{path} is not a usable GGUF file: {error or type(error).__name__}") from None


def gguf_metadata(reader: GGUFReader) -> Mapping[str, Any]:
    """Key to value; the arrays of the tokenizer are only counted, since they take seconds to unpack."""
    values: dict[str, Any] = {}
    for key, field in reader.fields.items():
        long_array = len(field.types) == 2 and len(field.data) > 256
        values[key] = range(len(field.data)) if long_array else field.contents()
    return values
