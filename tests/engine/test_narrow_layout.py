"""The layouts int4 and int8: which weights are packed, and what is kept beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.errors import ModelError
from engine.kernels import Products
from engine.quant import DenseLinear, GroupedWeight, PackedLinear, load_linear
from engine.quant.grouped import Bits
from engine.weights import open_model
from tests.support.packed import unpacked
from tests.support.tiny_models import save_tiny

LAYERS = {f"layers.{i}.{name}" for i in range(3) for name in ("qkv", "out", "gate_up", "down")}


def tensors_of(folder: Path, dtype: str, models_dir: str = "models") -> dict[str, torch.Tensor]:
    return open_model(str(folder / "model"), folder / models_dir, dtype).tensors()


def named(tensors: dict[str, torch.Tensor], ending: str) -> set[str]:
    return {name.removesuffix(ending) for name in tensors if name.endswith(ending)}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dtype", "bits"), [("int4", 4), ("auto", 4), ("int8", 8)])
def test_all_linear_layers_are_packed(dtype: str, bits: Bits, tied: bool, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen2", tie_word_embeddings=tied)
    narrow, dense = tensors_of(tmp_path, dtype), tensors_of(tmp_path, "float32")
    assert named(narrow, ".packed") == named(narrow, ".outputs") == {*LAYERS, "lm_head"}
    assert named(narrow, ".weight") == set()
    assert named(narrow, ".bias") == named(dense, ".bias")
    assert narrow["embedding"].dtype == torch.bfloat16
    for name in LAYERS:
        weight = dense[f"{name}.weight"]
        assert int(narrow[f"{name}.outputs"]) == len(weight)
        assert torch.equal(narrow[f"{name}.packed"], GroupedWeight.of(weight, bits).pack())
    head = dense["embedding" if tied else "lm_head.weight"]
    assert torch.equal(narrow["lm_head.packed"], GroupedWeight.of(head, 8).pack()), "8 bits in either layout"


def test_what_has_no_groups_of_32_inputs_stays_dense(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama", hidden_size=48, head_dim=16, intermediate_size=40)
    narrow, dense = tensors_of(tmp_path, "int4"), tensors_of(tmp_path, "float32")
    assert named(narrow, ".packed") == {name for name in LAYERS if name.endswith(".out")}
    for name in (*(name for name in LAYERS if not name.endswith(".out")), "lm_head"):
        assert torch.equal(narrow[f"{name}.weight"], dense[f"{name}.weight"])


@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_a_conversion_can_be_repeated(dtype: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen2")
    first, second = (open_model(str(tmp_path / "model"), tmp_path / name, dtype) for name in ("a", "b"))
    assert first.folder.name == second.folder.name
    for name in ("weights.bin", "weights.json"):
        assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes()


def test_a_layer_is_loaded_by_what_is_there_of_it(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen2", head_dim=4, initializer_range=0.05)  # 32 outputs with biases, 16 inputs
    narrow, products = tensors_of(tmp_path, "int4"), Products()
    qkv, out = (load_linear(narrow, f"layers.1.{name}", products) for name in ("qkv", "out"))
    assert isinstance(qkv, PackedLinear)
    assert isinstance(out, DenseLinear)
    x = torch.randn((5, 64), generator=torch.Generator().manual_seed(0))
    rows = int(narrow["layers.1.qkv.outputs"])
    dequantized = unpacked(narrow["layers.1.qkv.packed"], 4).dequantize()[:rows]
    wanted = x @ dequantized.t() + narrow["layers.1.qkv.bias"]
    assert float(torch.nn.functional.cosine_similarity(qkv(x), wanted).min()) > 0.999
    assert out(x[:, :16]).shape == (5, 64)


@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_weights_that_cannot_be_packed_are_named(dtype: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = 1e8
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="do not fit its configuration: a weight is not finite in 16 bits"):
        tensors_of(tmp_path, dtype)
