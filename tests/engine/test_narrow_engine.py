"""Engines with int8 and fp8 weights as on a card: copies, answers, graphs, adapters, sources, refusals."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

from engine.config import AdapterSource, EngineConfig, WeightsDtype
from engine.errors import ModelError
from engine.loading import load_engine
from engine.models.registry import load_model
from engine.narrow import RowScaled
from engine.weights import open_model, pull
from engine.weights.convert import ConvertedModel, ensure_converted
from engine.weights.layout import Layout, cpu_layout, dense_layout, rowwise_layout
from engine.weights.source import parse_source
from tests.engine.conftest import StartEngine
from tests.engine.test_gguf import write_gguf
from tests.support import narrow_standin
from tests.support.generation import generate
from tests.support.standin_device import StandinDevice, use_standin
from tests.support.tiny_adapters import save_random
from tests.support.tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

TYPES: dict[WeightsDtype, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LAYERS = [f"layers.{i}.{name}" for i in range(3) for name in ("qkv", "out", "gate_up", "down")]
ANSWER: dict[str, Any] = {"max_tokens": 24, "min_tokens": 24, "ignore_eos": True}
PROMPT = np.arange(3, 90, dtype=np.int32)


@pytest.fixture(params=TYPES)
def dtype(request: pytest.FixtureRequest) -> WeightsDtype:
    name: WeightsDtype = request.param
    return name


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> StandinDevice:
    return use_standin(monkeypatch)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return narrow_standin.install(monkeypatch)


def copy_of(model: Path, models_dir: Path, layout: Layout) -> ConvertedModel:
    return ensure_converted(parse_source(str(model)), models_dir, layout)


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_narrow_in_a_copy(dtype: WeightsDtype, tied: bool, tmp_path: Path) -> None:
    """The linear layers of each layer; the embedding and the head stay as they are."""
    save_tiny(tmp_path / "model", "qwen2", tie_word_embeddings=tied)
    narrow, exact = (
        copy_of(tmp_path / "model", tmp_path / "models", layout).tensors()
        for layout in (rowwise_layout(dtype, torch.bfloat16), dense_layout("float32"))
    )
    assert narrow.keys() == {*exact, *(f"{name}.scale" for name in LAYERS)}
    for name, tensor in exact.items():
        if name.removesuffix(".weight") in LAYERS:
            expected = RowScaled.of(tensor, TYPES[dtype])
            assert torch.equal(narrow[name].float(), expected.q.float())
            assert narrow[name].dtype == TYPES[dtype]
            assert torch.equal(narrow[name.replace(".weight", ".scale")], expected.scale)
        elif "norm" not in name:
            assert torch.equal(narrow[name], tensor.bfloat16())


@pytest.mark.parametrize("step", [1, -1])
def test_copies_stand_side_by_side(step: int, tmp_path: Path) -> None:
    """One of a layout throws none of another out, whichever was made last."""
    save_tiny(tmp_path / "model", "llama")
    layouts = [
        cpu_layout("int8"),
        dense_layout("bfloat16"),
        *(rowwise_layout(name, dense) for name in TYPES for dense in (torch.bfloat16, torch.float16)),
    ]
    folders = {copy_of(tmp_path / "model", tmp_path / "models", layout).folder for layout in layouts[::step]}
    assert set((tmp_path / "models" / "converted").iterdir()) == folders
    assert len(folders) == len(layouts)


async def test_answers_are_the_same_cold_and_cached_by_graphs_and_beside_others(
    device: StandinDevice, start_engine: StartEngine, dtype: WeightsDtype, calls: Counter[str]
) -> None:
    engine = start_engine(dtype=dtype, pool_tokens=512, max_batched_tokens=16)
    assert (engine.info.weights_dtype, engine.info.kv_dtype) == (dtype, "float32")
    assert device.maker.captured > 0
    cold = await generate(engine, PROMPT, use_cache=False, **ANSWER)
    first, cached = [await generate(engine, PROMPT, **ANSWER) for _ in range(2)]
    assert (first.ids, first.cached) == (cold.ids, 0)
    assert (cached.ids, cached.cached) == (cold.ids, 80)
    assert calls.keys() == {dtype}


async def test_in_16_bits_with_8_bit_keys_and_values(
    device: StandinDevice, start_engine: StartEngine, dtype: WeightsDtype
) -> None:
    device.dense = torch.bfloat16
    engine = start_engine(dtype=dtype, kv_dtype="fp8", pool_tokens=512)
    assert (engine.info.weights_dtype, engine.info.kv_dtype) == (dtype, "fp8")
    first, cached = [await generate(engine, PROMPT, **ANSWER) for _ in range(2)]
    assert len(first.ids) == len(cached.ids) == 24


def test_logits_are_close_to_those_of_the_model(
    device: StandinDevice, dtype: WeightsDtype, tmp_path: Path, calls: Counter[str]
) -> None:
    from tests.engine.test_hf_models import forward

    save_tiny(tmp_path / "model", "qwen2", initializer_range=0.1)
    exact, narrow = (load_model(str(tmp_path / "model"), tmp_path, name, (), device) for name in ("float32", dtype))
    assert narrow.weights == dtype
    with torch.inference_mode():
        expected, close = (forward(loaded.model, torch.arange(3, 43), 8, 8) for loaded in (exact, narrow))
    assert float(torch.nn.functional.cosine_similarity(close, expected, dim=-1).min()) > 0.98
    assert calls[dtype] == 5 * len(LAYERS)


async def test_an_adapter(
    device: StandinDevice,
    start_engine: StartEngine,
    dtype: WeightsDtype,
    tiny: tuple[Path, PreTrainedModel],
    tmp_path: Path,
) -> None:
    save_random(tmp_path / "ann", tiny[1], seed=1)
    engine = start_engine(dtype=dtype, pool_tokens=512, adapters=(AdapterSource("ann", tmp_path / "ann"),))
    plain = start_engine(dtype=dtype, pool_tokens=512)
    base, adapted = [await generate(engine, PROMPT, adapter=name, **ANSWER) for name in (None, "ann")]
    assert base.ids == (await generate(plain, PROMPT, **ANSWER)).ids
    assert len(adapted.ids) == 24
    assert adapted.ids != base.ids


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1])
def test_a_gguf_file_is_dequantized_first(dtype: WeightsDtype, kind: Kind, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", save_tiny(tmp_path / "hf", "llama"), kind)
    narrow, exact = (
        copy_of(tmp_path / "model.gguf", tmp_path / "models", layout).tensors()
        for layout in (rowwise_layout(dtype, torch.bfloat16), dense_layout("float32"))
    )
    for name in LAYERS:
        expected = RowScaled.of(exact[f"{name}.weight"], TYPES[dtype])
        assert torch.equal(narrow[f"{name}.weight"].float(), expected.q.float())


@pytest.mark.parametrize(("inner", "told"), [(96, 0), (72, 1)])
async def test_layers_that_no_product_takes_stay_dense(
    device: StandinDevice,
    start_engine: StartEngine,
    dtype: WeightsDtype,
    inner: int,
    told: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """72 = 4.5 * 16 inputs of down; gate and up have 144 outputs together."""
    caplog.set_level(logging.WARNING, logger="engine")
    save_tiny(tmp_path / "model", "llama", intermediate_size=inner)
    engine = start_engine(model=str(tmp_path / "model"), dtype=dtype, pool_tokens=512)
    message = f"3 of 12 linear layers stay dense, since {dtype} products want multiples of 16 inputs and outputs"
    assert caplog.text.count(message) == told
    assert len((await generate(engine, PROMPT, **ANSWER)).ids) == 24


def test_a_weight_that_is_not_finite_is_refused(dtype: WeightsDtype, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "llama")
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.down_proj.weight")[3, 3] = float("inf")
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="a weight is not finite"):
        copy_of(tmp_path / "model", tmp_path / "models", rowwise_layout(dtype, torch.bfloat16))


def test_models_that_transformers_runs_are_refused(device: StandinDevice, dtype: WeightsDtype, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "gpt2")
    with pytest.raises(ModelError, match=f"{dtype} weights on CUDA are only supported for models of the Llama family"):
        load_model(str(tmp_path / "model"), tmp_path, dtype, device=device)


def test_fp8_is_not_for_a_cpu(tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    for refused in (
        lambda: load_engine(EngineConfig(tmp_path, str(tiny[0]), device="cpu", dtype="fp8")),
        lambda: open_model(str(tiny[0]), tmp_path, "fp8"),
        lambda: pull(str(tiny[0]), tmp_path, "fp8"),
    ):
        with pytest.raises(ModelError, match="fp8 weights are for CUDA: on the CPU, choose int4, int8"):
            refused()
