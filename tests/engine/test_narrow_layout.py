"""The layout int4: beside the packed weights, 8-bit ones where the processor multiplies those, else dense ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from engine.quant.linear import FEW_BESIDE_INT8, MOST_PACKED_ROWS, Int4Linear, load_linear
from engine.weights import convert, open_model
from engine.weights.calibration import input_peaks
from engine.weights.convert import ConvertedModel
from tests.support.tiny_models import save_tiny


def converted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, vnni: bool, models_dir: str = "models"
) -> ConvertedModel:
    monkeypatch.setattr(convert, "multiplies_int8", lambda: vnni)
    return open_model(str(folder / "model"), folder / models_dir, "int4")


def test_a_processor_of_another_kind_has_a_copy_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "model", "llama")
    narrow, dense = (converted(tmp_path, monkeypatch, vnni=vnni) for vnni in (True, False))
    assert narrow.folder != dense.folder
    layers = {f"layers.{i}.{name}" for i in range(3) for name in ("qkv", "out", "gate_up", "down")}
    assert {n.removesuffix(".int8") for n in narrow.tensors() if n.endswith(".int8")} == {*layers, "lm_head"}
    assert not any(f"{name}.weight" in narrow.tensors() for name in layers)
    assert {n.removesuffix(".weight") for n in dense.tensors() if n.endswith(".weight")} == layers
    smoothed = {n.removesuffix(".smoothing") for n in narrow.tensors() if n.endswith(".smoothing")}
    assert smoothed == layers


def test_a_conversion_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "model", "qwen2")
    first, second = (converted(tmp_path, monkeypatch, vnni=True, models_dir=name) for name in ("a", "b"))
    assert first.folder.name == second.folder.name
    for name in ("weights.bin", "weights.json"):
        assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes()


@pytest.mark.parametrize("name", ["layers.1.qkv", "layers.1.down"])
def test_both_layouts_hold_the_same_layer(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "model", "qwen2", initializer_range=0.05)  # with biases
    tensors = converted(tmp_path, monkeypatch, vnni=True).tensors()
    linear = load_linear(tensors, name)
    assert isinstance(linear, Int4Linear)
    x = torch.randn((FEW_BESIDE_INT8 + 1, tensors[f"{name}.scale_zero"].shape[0] * 32))
    few, many = linear(x[:-1]), linear(x)
    assert float(torch.nn.functional.cosine_similarity(few, many[:-1]).min()) > 0.98
    assert not torch.equal(few, many[:-1])
    assert FEW_BESIDE_INT8 <= MOST_PACKED_ROWS  # by which the warm-up reaches both


def test_8_bit_weights_leave_with_their_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "model", "llama")
    tensors = converted(tmp_path, monkeypatch, vnni=True).tensors()
    files = {name: tensor.untyped_storage().data_ptr() for name, tensor in tensors.items()}
    unpacked = {files[name] for name in files if name.endswith(".int8")}
    assert len(unpacked) == 1
    assert unpacked.isdisjoint(files[name] for name in files if not name.endswith(".int8"))


def one_word() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@pytest.mark.parametrize("tokenizer", [None, "{}", one_word().to_str()], ids=["too large", "unusable", "of one word"])
@pytest.mark.parametrize("vocabulary", [3, 50, 1000])
def test_any_vocabulary_can_be_calibrated(vocabulary: int, tokenizer: str | None, tmp_path: Path) -> None:
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    save_tiny(tmp_path / "model", "llama", vocab_size=vocabulary, max_position_embeddings=40, **ends)
    model = open_model(str(tmp_path / "model"), tmp_path / "models", "float32")
    assets = model.assets if tokenizer is None else replace(model.assets, tokenizer_json=tokenizer)
    peaks, again = (input_peaks(model.config, model.tensors(), assets) for _ in range(2))
    assert set(peaks) == {f"layers.{i}.{name}" for i in range(3) for name in ("qkv", "out", "gate_up", "down")}
    for name, largest in peaks.items():
        assert bool((largest.isfinite() & (largest > 0)).all())
        assert torch.equal(largest, again[name])


def test_calibration_sees_what_the_layers_see(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    model = open_model(str(tmp_path / "model"), tmp_path / "models", "float32")
    tensors = dict(model.tensors())
    before = input_peaks(model.config, tensors, model.assets)["layers.0.qkv"]
    tensors["layers.0.attention_norm"] = tensors["layers.0.attention_norm"] * torch.arange(1, 65)
    after = input_peaks(model.config, tensors, model.assets)["layers.0.qkv"]
    torch.testing.assert_close(after, before * torch.arange(1, 65))


def test_layers_of_massive_inputs_are_left_alone(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    model = open_model(str(tmp_path / "model"), tmp_path / "models", "float32")
    tensors = dict(model.tensors())
    before = set(input_peaks(model.config, tensors, model.assets))
    norm = tensors["layers.1.mlp_norm"].clone()
    norm[7] *= 1000
    tensors["layers.1.mlp_norm"] = norm
    assert before - set(input_peaks(model.config, tensors, model.assets)) >= {"layers.1.gate_up"}
