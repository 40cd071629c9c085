"""GGUF files made here, of several quantizations and architectures, against transformers on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

from engine.models.decoder import Decoder
from engine.text.api import ChatMessage
from engine.text.codec import Codec
from engine.weights import open_model
from engine.weights.tensors import interleave_rotary
from tests.engine.test_decoder import assert_equals
from tests.support.packed import unpacked
from tests.support.tiny_models import CHATML, ascii_tokenizer, save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{suffix}"


def write_gguf(path: Path, model: PreTrainedModel, kind: Kind, architecture: str | None = None) -> None:
    """Writes the model as llama.cpp's converter would, and rounds its own weights alike."""
    c = model.config
    architecture = architecture or c.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    rope = c.rope_parameters
    if rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope:
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(c, "sliding_window", None):
        writer.add_sliding_window(c.sliding_window)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer.add_key_length(head_dim)
    tokenizer = ascii_tokenizer()
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if index < 3 else 1 for _, index in vocabulary])
    writer.add_token_merges([f"{token[0]} {token[1]}" for token, index in vocabulary if index >= 3 and len(token) == 2])
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        stored = kind if values.ndim == 2 else Kind.F32
        packed = gguf.quants.quantize(values, stored)
        rounded = gguf.quants.dequantize(packed, stored).reshape(values.shape)
        parameter.data.copy_(torch.from_numpy(np.array(rounded, dtype=np.float32)))
        heads = {"q": c.num_attention_heads, "k": c.num_key_value_heads}.get(name.partition("self_attn.")[2][:1])
        if architecture in ("llama", "smollm3") and heads and "_proj" in name:
            values = interleave_rotary(torch.from_numpy(values.copy()), heads, head_dim).numpy()
            packed = gguf.quants.quantize(values, stored)
        writer.add_tensor(gguf_name(name), packed, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


CASES = [
    ("llama", Kind.F32),
    ("llama", Kind.F16),
    ("llama", Kind.Q8_0),
    ("llama", Kind.Q4_0),
    ("llama", Kind.Q4_1),
    ("llama", Kind.Q5_1),
    ("qwen2", Kind.F16),
    ("qwen2", Kind.Q4_1),
    ("qwen3", Kind.Q8_0),
    ("smollm3", Kind.Q8_0),
]


@pytest.mark.parametrize(("model_type", "kind"), CASES, ids=[f"{name}-{kind.name}" for name, kind in CASES])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers(model_type: str, kind: Kind, tied: bool, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "source", model_type, tie_word_embeddings=tied, head_dim=16)
    write_gguf(tmp_path / "model.gguf", reference, kind)
    converted = open_model(str(tmp_path / "model.gguf"), tmp_path / "models", "float32")
    assert_equals(Decoder(converted.config, converted.tensors()), reference)

    codec = Codec(converted.assets)
    text = "HELLO there"
    assert codec.decode(codec.encode(text)) == text
    prompt = codec.prompt([ChatMessage("user", "hi")])
    assert prompt.tokens[0] == 1
    assert codec.eos_ids >= {2}


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "rope yarn": ("qwen2", {"rope_parameters": YARN}),
    "rope linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "layers without positions": ("smollm3", {"num_hidden_layers": 5, "head_dim": 16}),
    "a window that is not used": ("qwen3", {"head_dim": 16, "sliding_window": 8}),
}


@pytest.mark.parametrize(("model_type", "options"), OPTIONS.values(), ids=OPTIONS)
def test_options_in_the_metadata(model_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "source", model_type, **options)
    write_gguf(tmp_path / "model.gguf", reference, Kind.F32)
    converted = open_model(str(tmp_path / "model.gguf"), tmp_path / "models", "float32")
    assert_equals(Decoder(converted.config, converted.tensors()), reference)


def test_a_window_in_the_metadata(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "source", "mistral", sliding_window=9)
    write_gguf(tmp_path / "model.gguf", reference, Kind.F32, architecture="llama")
    converted = open_model(str(tmp_path / "model.gguf"), tmp_path / "models", "float32")
    assert_equals(Decoder(converted.config, converted.tensors()), reference)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1])
def test_four_bit_files_are_packed_without_rounding_again(kind: Kind, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "source", "llama", initializer_range=0.05)
    write_gguf(tmp_path / "model.gguf", reference, kind)
    dense, packed = (
        open_model(str(tmp_path / "model.gguf"), tmp_path / "models", dtype) for dtype in ("float32", "int4")
    )
    for name in ("layers.0.qkv", "layers.0.gate_up", "layers.2.down"):
        exact = dense.tensors()[f"{name}.weight"]
        assert torch.equal(unpacked(packed.tensors()[f"{name}.packed"], 4).dequantize()[: len(exact)], exact)
