"""The compact decoder against transformers, on small random models: the same logits, cold, chunked and cached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention import AttentionRow, KVShape, TorchAttention
from engine.errors import ModelError
from engine.models.decoder import Decoder
from engine.weights import open_model
from tests.support.tiny_models import save_tiny

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    ("llama", {"rope_parameters": LLAMA3_ROPE}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    ("llama", {"max_shard_size": "40KB"}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 16}),
]
IDS = [f"{name}-{'-'.join(options) or 'plain'}" for name, options in MODELS]


def attention_for(model: Decoder, page_size: int = 4, num_pages: int = 64) -> TorchAttention:
    c = model.config
    return TorchAttention(KVShape(c.num_layers, c.num_kv_heads, c.head_dim, num_pages, page_size, torch.float32))


def logits(model: Decoder, attention: TorchAttention, ids: torch.Tensor, row: AttentionRow) -> torch.Tensor:
    attention.plan([row])
    span = torch.arange(row.start, row.start + row.count)
    with torch.inference_mode():
        return model.forward(ids[span], span, torch.arange(row.count), attention)


@pytest.mark.parametrize(("model_type", "options"), MODELS, ids=IDS)
def test_logits_equal_transformers(model_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "model", model_type, **options)
    converted = open_model(str(tmp_path / "model"), tmp_path / "models", "float32")
    model = Decoder(converted.config, converted.tensors())
    ids = torch.randint(3, converted.config.vocab_size, (100,), generator=torch.Generator().manual_seed(1))
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


@pytest.mark.parametrize("dtype", ["int4", "bfloat16"])
def test_narrow_weights_stay_close_to_the_dense_model(dtype: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama", initializer_range=0.05)
    dense, packed = (open_model(str(tmp_path / "model"), tmp_path / "models", name) for name in ("float32", dtype))
    exact, model = (Decoder(m.config, m.tensors()) for m in (dense, packed))
    assert any(name.endswith(".int4") for name in packed.tensors()) == (dtype == "int4")
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
    ("change", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text('{"model_type": "gpt2"}'), "'gpt2' is not supported"),
        (lambda f: (f / "config.json").write_text("{nonsense"), "cannot be read"),
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
