"""The compact decoder against transformers, on small random models: the same logits, cold, chunked and cached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine.attention import AttentionRow, CpuAttention
from engine.errors import ModelError
from engine.models.base import Model
from engine.models.decoder import Decoder
from engine.weights import open_model
from tests.support.tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 4.0,
}
MSCALE = {**YARN_ROPE, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama, rope llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, rope linear": ("llama", {"rope_parameters": {**DYNAMIC_ROPE, "rope_type": "linear"}}),
    "llama, rope dynamic": ("llama", {"rope_parameters": DYNAMIC_ROPE}),
    "llama, rope yarn": ("llama", {"rope_parameters": YARN_ROPE}),
    "llama, rope yarn with mscale": ("llama", {"rope_parameters": MSCALE}),
    "llama, sharded": ("llama", {"max_shard_size": "40KB"}),
    "llama, as SmolLM2": ("llama", {"tie_word_embeddings": True, "num_attention_heads": 6, "hidden_size": 96}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 10}),
    "mistral, window, sharded": ("mistral", {"sliding_window": 7, "max_shard_size": "40KB"}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm3, untied": ("smollm3", {"tie_word_embeddings": False, "no_rope_layers": [0, 1, 0]}),
    "smollm3, windows without positions": (
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 12},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, window not used": ("qwen2", {"sliding_window": 8}),
    "qwen2, upper layers windowed": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen2, rope yarn": ("qwen2", {"rope_parameters": YARN_ROPE}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, tied, biases": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3, listed windows": (
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 1,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def attention_for(model: Model, page_size: int = 4, num_pages: int = 64) -> CpuAttention:
    return CpuAttention(model.spec.kv_shape(num_pages, page_size, torch.float32), model.spec.layers)


def logits(model: Model, attention: CpuAttention, ids: torch.Tensor, row: AttentionRow) -> torch.Tensor:
    attention.plan([row])
    span = torch.arange(row.start, row.start + row.count)
    with torch.inference_mode():
        return model.forward(ids[span], span, torch.arange(row.count), attention)


@pytest.mark.parametrize(("model_type", "options"), MODELS.values(), ids=MODELS)
def test_logits_equal_transformers(model_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "model", model_type, **options)
    converted = open_model(str(tmp_path / "model"), tmp_path / "models", "float32")
    assert_equals(Decoder(converted.config, converted.tensors()), reference)


def assert_equals(model: Model, reference: PreTrainedModel) -> None:
    """100 tokens have the reference's logits: computed at once, from pages that hold the first 48, in chunks, and
    beside another sequence."""
    ids = torch.randint(3, model.spec.vocab_size, (100,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    attention = attention_for(model)
    pages = np.arange(25, dtype=np.int32)[::-1].copy()  # no two adjacent pages are neighbours

    cold = logits(model, attention, ids, AttentionRow(1, pages, 0, 100, 100))
    torch.testing.assert_close(cold, expected, atol=1e-4, rtol=0)

    attention.drop(1)
    cached = logits(
        model, attention, ids, AttentionRow(2, pages, 48, 52, 100)
    )  # from the pages that the first one filled
    torch.testing.assert_close(cached, expected[48:], atol=1e-4, rtol=0)

    other = np.arange(30, 55, dtype=np.int32)
    for start, count in [(0, 1), (1, 6), (7, 1), (8, 60), (68, 31), (99, 1)]:
        part = logits(model, attention, ids, AttentionRow(3, other, start, count, 100))
        torch.testing.assert_close(part, expected[start : start + count], atol=1e-4, rtol=0)

    attention.drop(3)
    short = ids[30:57]  # whole, while the other sequence goes on from its cached 60 tokens
    with torch.inference_mode():
        expected_short = reference(short[None]).logits[0]
        attention.plan([AttentionRow(4, other, 60, 13, 100), AttentionRow(5, pages, 0, len(short), len(short))])
        positions = torch.cat((torch.arange(60, 73), torch.arange(len(short))))
        rows = torch.tensor([12, 13, 39])
        beside = model.forward(torch.cat((ids[60:73], short)), positions, rows, attention)
    wanted = torch.stack((expected[72], expected_short[0], expected_short[26]))
    torch.testing.assert_close(beside, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["int4", "int8", "bfloat16"])
def test_narrow_weights_stay_close_to_the_dense_model(dtype: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama", initializer_range=0.05)
    dense, packed = (open_model(str(tmp_path / "model"), tmp_path / "models", name) for name in ("float32", dtype))
    exact, model = (Decoder(m.config, m.tensors()) for m in (dense, packed))
    assert any(name.endswith(".packed") for name in packed.tensors()) == (dtype != "bfloat16")
    ids = torch.arange(3, 83)
    row = AttentionRow(1, np.arange(20, dtype=np.int32), 0, 80, 80)
    expected = logits(exact, attention_for(exact), ids, row)
    few = torch.cat(
        [
            logits(model, attention, ids, AttentionRow(1, row.pages, start, 8, 80))
            for attention in [attention_for(model)]
            for start in range(0, 80, 8)
        ]
    )
    similarity = torch.nn.functional.cosine_similarity(few, expected, dim=-1)
    assert float(similarity.min()) > 0.95


@pytest.mark.parametrize(
    "options",
    [
        {"num_key_value_heads": 1, "head_dim": 4},  # 24 queries, keys and values do not fill blocks of 16 outputs
        {"num_key_value_heads": 1, "head_dim": 20, "intermediate_size": 36},  # nor do 72 gates and ups
        {"hidden_size": 40, "head_dim": 16},  # only `out` and `down` are packed, and do not fill them
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "head_dim": 12},
        {"tie_word_embeddings": True, "hidden_size": 48},
    ],
)
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_layers_of_any_size_are_packed_or_dense(dtype: str, options: dict[str, Any], tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama", **{"initializer_range": 0.05, **options})
    dense, packed = (open_model(str(tmp_path / "model"), tmp_path / "models", name) for name in ("float32", dtype))
    exact, model = (Decoder(m.config, m.tensors()) for m in (dense, packed))
    ids = torch.arange(3, 83)
    pages = np.arange(20, dtype=np.int32)
    expected = logits(exact, attention_for(exact), ids, AttentionRow(1, pages, 0, 80, 80))
    attention = attention_for(model)
    found = torch.cat(
        [logits(model, attention, ids, AttentionRow(1, pages, start, 16, 80)) for start in range(0, 80, 16)]
    )
    assert float(torch.nn.functional.cosine_similarity(found, expected, dim=-1).min()) > 0.95


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text('{"model_type": "gpt2"}'), "'gpt2' is not supported"),
        (lambda f: (f / "config.json").write_text("{nonsense"), "cannot be read"),
        (lambda f: (f / "config.json").write_text("[]"), "is not a JSON object"),
        (lambda f: set_options(f, rope_parameters="none"), "rope_parameters is no object"),
        (lambda f: set_options(f, rope_parameters={"rope_type": "yarn", "factor": 0}), "cannot be used: "),
        (lambda f: set_options(f, rope_parameters={"rope_type": "linear"}), "has no 'factor'"),
        (
            lambda f: set_options(f, rope_parameters={"rope_type": "longrope"}),
            "rotary positions that are not supported",
        ),
        (lambda f: set_options(f, hidden_act="gelu"), "an activation or rotary positions"),
        (lambda f: set_options(f, num_key_value_heads=3), "cannot share 3 key heads"),
        (lambda f: set_options(f, max_position_embeddings=0), "context_length = 0"),
        (lambda f: set_options(f, head_dim=15), "an even head size"),
        (lambda f: set_options(f, model_type="mistral", sliding_window=-1), "at least 1 token"),
        (lambda f: set_options(f, model_type="smollm3", no_rope_layers=[1]), "has 1 rotary layers for 3 layers"),
        (
            lambda f: set_options(f, model_type="qwen2", use_sliding_window=True, layer_types=["chunked_attention"]),
            "the layer type 'chunked_attention'",
        ),
        (lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), "has no 'num_attention_heads'"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 50), "not a usable safetensors"),
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]),
            "not a usable",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "no *.safetensors"),
        (lambda f: drop_tensor(f, "model.layers.1.mlp.up_proj.weight"), "lacks 1 tensors"),
        (lambda f: add_tensor(f, "model.layers.1.mlp.extra.weight"), "1 tensors of unknown use"),
        (
            lambda f: reshape_tensor(f, "model.layers.1.mlp.up_proj.weight"),
            "has the shape [95, 64], and the configuration says [96, 64]",
        ),
    ],
)
def test_unusable_folders_are_named(change: Any, message: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    change(tmp_path / "model")
    with pytest.raises(ModelError) as caught:
        open_model(str(tmp_path / "model"), tmp_path / "models", "float32")
    assert message in str(caught.value)


def set_options(folder: Path, **options: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **options}))


def rewrite(folder: Path, change: Any) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def drop_tensor(folder: Path, name: str) -> None:
    rewrite(folder, lambda tensors: tensors.pop(name))


def add_tensor(folder: Path, name: str) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(4)}))


def reshape_tensor(folder: Path, name: str) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
