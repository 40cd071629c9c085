"""Engines whose keys and values are 8-bit floats, over the stand-in: scales, sizes, answers, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import engine.attention.build as build
from engine.attention import Choice
from engine.attention.kv_scales import FP8, Fp8, KVScales
from engine.attention.paged_kv import PagedKV
from engine.calibration import calibrate
from engine.config import AdapterSource, EngineConfig
from engine.errors import ModelError
from engine.loading import load_engine
from engine.models.registry import LoadedModel, load_model
from engine.text import Codec
from engine.weights.layout import dense_layout
from tests.engine.conftest import StartEngine
from tests.support.generation import generate
from tests.support.standin_device import StandinDevice, use_standin
from tests.support.tiny_adapters import save_random
from tests.support.tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 3
BYTES = LAYERS * 2 * 2 * 16
"""A token's in the small model, with an element of one byte."""

ANSWER: dict[str, Any] = {"max_tokens": 24, "min_tokens": 24, "ignore_eos": True}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> StandinDevice:
    return use_standin(monkeypatch)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[PagedKV]:
    """Those that backends are built over from now on."""
    made: list[PagedKV] = []

    def kept(*args: Any) -> PagedKV:
        made.append(PagedKV(*args))
        return made[-1]

    monkeypatch.setattr(build, "PagedKV", kept)
    return made


@pytest.fixture
def loaded(tiny: tuple[Path, PreTrainedModel], device: StandinDevice) -> LoadedModel:
    return load_model(str(tiny[0]), tiny[0].parent / "converted-tiny", "float32", device=device)


def test_scales_are_found_at_load(
    device: StandinDevice, stores: list[PagedKV], start_engine: StartEngine, loaded: LoadedModel
) -> None:
    """Both pools, that of the trial and that of the engine, have them."""
    start_engine(kv_dtype="fp8")
    found = calibrate(loaded, Codec(loaded.assets), FP8, device, 256)
    assert found is not None
    assert [(kv.scaled, kv.attend_dtype) for kv in stores] == [(True, torch.float32)] * 2
    for kv in stores:
        scales = [kv.scales(layer) for layer in range(LAYERS)]
        assert scales == list(zip(found.scales.keys, found.scales.values, strict=True))
        assert (1.0, 1.0) not in scales


def test_the_pool_has_four_times_the_tokens_of_float32(device: StandinDevice, start_engine: StartEngine) -> None:
    narrow = start_engine(kv_dtype="fp8", gpu_memory_utilization=0.75)
    wide = start_engine(gpu_memory_utilization=0.75)
    assert (narrow.info.kv_dtype, wide.info.kv_dtype) == ("fp8", "float32")
    room = device.total * 3 // 4 - device.used - device.taken
    assert [info.num_pages for info in (narrow.info, wide.info)] == [room // BYTES // 16, room // (4 * BYTES) // 16]
    assert narrow.info.pool_bytes == narrow.info.pool_tokens * BYTES


def test_what_torch_gathers_in_a_layer_wants_room(
    device: StandinDevice, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 bits as they are stored, and 32 as they are attended to."""
    monkeypatch.setattr(device, "attention", lambda head_dim, kv_dtype: Choice("torch-paged", "asked for"))
    engine = start_engine(kv_dtype="fp8", gpu_memory_utilization=0.75)
    token = BYTES + (BYTES + 4 * BYTES) // LAYERS
    assert engine.info.num_pages == (device.total * 3 // 4 - device.used - device.taken) // token // 16


async def test_answers_are_the_same_cold_and_cached_by_graphs_and_by_torch(
    device: StandinDevice, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    flashinfer = start_engine(kv_dtype="fp8", pool_tokens=512, max_batched_tokens=16)
    assert len(device.maker.alive) > 0
    monkeypatch.setattr(device, "attention", lambda head_dim, kv_dtype: Choice("torch-paged", "asked for"))
    plain = start_engine(kv_dtype="fp8", pool_tokens=512, max_batched_tokens=16)
    prompt = np.arange(3, 90, dtype=np.int32)
    cold = await generate(plain, prompt, use_cache=False, **ANSWER)
    for engine in (flashinfer, plain):
        first, cached = [await generate(engine, prompt, **ANSWER) for _ in range(2)]
        assert (first.ids, first.cached) == (cold.ids, 0)
        assert (cached.ids, cached.cached) == (cold.ids, 80)
    assert {"decode run", "prefill run"} <= device.standin.calls.keys()


async def test_a_draft_model_has_scales_of_its_own(
    device: StandinDevice, stores: list[PagedKV], start_engine: StartEngine, tiny: tuple[Path, PreTrainedModel]
) -> None:
    engine = start_engine(kv_dtype="fp8", speculation="draft", draft_model=str(tiny[0]), pool_tokens=512)
    assert len(stores) == 4  # two in the trial
    assert len({tuple(kv.scales(layer) for layer in range(LAYERS)) for kv in stores}) == 1
    answer = await generate(engine, np.arange(3, 40, dtype=np.int32), **ANSWER)
    assert len(answer.ids) == 24


@pytest.mark.parametrize("most", [1000, 64, 7])
def test_scales_do_not_depend_on_the_steps(loaded: LoadedModel, device: StandinDevice, most: int) -> None:
    codec = Codec(loaded.assets)
    assert calibrate(loaded, codec, FP8, device, most) == calibrate(loaded, codec, FP8, device, 256)


@pytest.mark.parametrize(
    ("weights", "best", "attend"),
    [
        ("bfloat16", "float16", torch.bfloat16),
        ("float16", "bfloat16", torch.float16),
        ("float32", "bfloat16", torch.bfloat16),
        ("float32", "float16", torch.float16),
    ],
)
def test_what_is_attended_in(
    device: StandinDevice, monkeypatch: pytest.MonkeyPatch, weights: str, best: str, attend: torch.dtype
) -> None:
    """As the weights are, or else as the card does best."""
    monkeypatch.setattr(device, "layout", lambda wish: dense_layout(best))
    monkeypatch.setattr("engine.calibration._find_scales", lambda *_: KVScales.ones(1))
    loaded = LoadedModel(None, None, None, weights)  # type: ignore[arg-type]
    assert calibrate(loaded, None, FP8, device, 16) == Fp8(KVScales.ones(1), attend)  # type: ignore[arg-type]
    assert calibrate(loaded, None, torch.bfloat16, device, 16) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("largest", "warned"), [(200.0, False), (700.0, True)])
def test_large_keys_are_warned_of(
    device: StandinDevice,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    largest: float,
    warned: bool,
) -> None:
    scales = KVScales.for_largest([1.0, largest], [1.0, 1000.0])
    monkeypatch.setattr("engine.calibration._find_scales", lambda *_: scales)
    calibrate(LoadedModel(None, None, None, "bfloat16"), None, FP8, device, 16)  # type: ignore[arg-type]
    assert ("the keys of 1 layers are in the hundreds" in caplog.text) == warned


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_not_on_a_cpu(tiny: tuple[Path, PreTrainedModel], tmp_path: Path, attention: Any) -> None:
    with pytest.raises(ModelError, match="fp8 keys and values are for CUDA: on the CPU, choose int8"):
        load_engine(
            EngineConfig(tmp_path, str(tiny[0]), device="cpu", dtype="float32", kv_dtype="fp8", attention=attention)
        )


@pytest.mark.parametrize("name", ["flashinfer", "torch-paged"])
async def test_a_model_that_transformers_runs(
    device: StandinDevice,
    stores: list[PagedKV],
    start_engine: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: Any,
) -> None:
    """With a window in some layers, and soft caps."""
    save_tiny(tmp_path, "gemma2", head_dim=16, sliding_window=40, query_pre_attn_scalar=16)
    monkeypatch.setattr(device, "attention", lambda head_dim, kv_dtype: Choice(name, "asked for"))
    engine = start_engine(model=str(tmp_path), kv_dtype="fp8", pool_tokens=512)
    assert (1.0, 1.0) not in [stores[-1].scales(layer) for layer in range(LAYERS)]
    prompt = np.arange(3, 90, dtype=np.int32)
    first, cached = [await generate(engine, prompt, **ANSWER) for _ in range(2)]
    assert (first.ids, cached.cached) == (cached.ids, 80)


async def test_adapters_have_the_scales_of_their_model(
    device: StandinDevice,
    stores: list[PagedKV],
    start_engine: StartEngine,
    tiny: tuple[Path, PreTrainedModel],
    tmp_path: Path,
) -> None:
    start_engine(kv_dtype="fp8", pool_tokens=512)
    save_random(tmp_path / "ann", tiny[1], seed=1)
    engine = start_engine(kv_dtype="fp8", pool_tokens=512, adapters=(AdapterSource("ann", tmp_path / "ann"),))
    assert len({tuple(kv.scales(layer) for layer in range(LAYERS)) for kv in stores}) == 1
    answer = await generate(engine, np.arange(3, 40, dtype=np.int32), adapter="ann", **ANSWER)
    assert len(answer.ids) == 24


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
async def test_float32_weights_over_what_is_attended_to_in_16_bits(
    device: StandinDevice,
    stores: list[PagedKV],
    start_engine: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    model_type: str,
) -> None:
    monkeypatch.setattr(device, "layout", lambda wish: dense_layout("bfloat16" if wish == "auto" else wish))
    save_tiny(tmp_path, model_type, head_dim=16)
    engine = start_engine(model=str(tmp_path), kv_dtype="fp8", pool_tokens=512)
    assert {kv.attend_dtype for kv in stores} == {torch.bfloat16}
    answer = await generate(engine, np.arange(3, 40, dtype=np.int32), **ANSWER)
    assert len(answer.ids) == 24
