"""Which device a model runs on, and what it is told there. No card is needed: torch's answers are put in its mouth."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.config import DeviceWish, EngineConfig, KVDtype, WeightsDtype
from engine.devices import CpuDevice, CudaDevice, Device, find_device, told_what_to_lower
from engine.errors import DeviceUnavailable, ModelError, OutOfDeviceMemory
from engine.loading import load_engine
from engine.models.elementwise import CpuElementwise, Elementwise, TorchElementwise
from engine.models.fused import FlashInferElementwise
from tests.engine.conftest import StartEngine
from tests.support.generation import generate
from tests.support.standin_device import StandinDevice, use_standin

GIB = 2**30
CARD = torch.device("cuda", 0)
ALL = frozenset({"flashinfer", "flash_attn", "ninja", "nvcc"})


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("wish", "place", "reason"),
    [("auto", "cuda:0", "H200"), ("cuda", "cuda:0", "asked for, H200"), ("cpu", "cpu", "asked")],
)
def test_with_a_card(wish: DeviceWish, place: str, reason: str) -> None:
    device = find_device(wish, "auto")
    assert str(device.place) == place
    assert reason in device.reason


@pytest.mark.usefixtures("no_card")
@pytest.mark.parametrize(("wish", "reason"), [("auto", "torch finds no CUDA here"), ("cpu", "asked for")])
def test_without_a_card(wish: DeviceWish, reason: str) -> None:
    device = find_device(wish, "torch")
    assert (str(device.place), device.reason) == ("cpu", reason)
    assert device.attention(64, torch.float32).name == "torch-paged"


@pytest.mark.usefixtures("no_card")
def test_a_card_that_is_not_there(tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    with pytest.raises(DeviceUnavailable, match="the device cuda was asked for, and torch finds none"):
        load_engine(EngineConfig(tmp_path, str(tiny[0]), device="cuda"))


CPU, CUDA = CpuDevice(), CudaDevice(CARD, "auto", ALL, "")


@pytest.mark.parametrize(
    ("device", "bf16", "dtype", "kv_dtype", "weights", "kv"),
    [
        (CPU, True, "auto", "auto", "int4", torch.bfloat16),
        (CPU, True, "float32", "auto", "float32", torch.float32),
        (CPU, True, "float16", "auto", "float16", torch.bfloat16),
        (CPU, True, "int8", "int8", "int8", torch.int8),
        (CUDA, True, "auto", "auto", "bfloat16", torch.bfloat16),
        (CUDA, False, "auto", "auto", "float16", torch.float16),
        (CUDA, True, "float16", "auto", "float16", torch.float16),
        (CUDA, True, "float32", "bfloat16", "float32", torch.bfloat16),
    ],
)
def test_types(
    device: Device,
    bf16: bool,
    dtype: WeightsDtype,
    kv_dtype: KVDtype,
    weights: str,
    kv: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    assert device.weights(dtype) == weights
    assert device.kv(kv_dtype, weights) == kv


@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_packed_weights_are_for_the_cpu(dtype: WeightsDtype) -> None:
    with pytest.raises(ModelError, match=f"{dtype} weights are for the CPU"):
        CUDA.weights(dtype)


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        (CPU, CpuElementwise),
        (CUDA, FlashInferElementwise),
        (CudaDevice(CARD, "torch", ALL, ""), TorchElementwise),
        (CudaDevice(CARD, "auto", frozenset(), ""), TorchElementwise),
    ],
)
def test_kernels(device: Device, kind: type[Elementwise]) -> None:
    assert type(device.elementwise(torch.bfloat16)) is kind


def test_the_room_of_a_card_is_measured_behind_the_largest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers count as in use, its keys and values do not."""
    free = [50 * GIB]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 80 * GIB))

    def largest_step() -> int:
        free[0] -= 5 * GIB
        return GIB

    room = CUDA.room(0.9, largest_step)
    assert (room.usual, room.most) == (72 * GIB - 34 * GIB, 46 * GIB)


def test_out_of_memory_says_what_to_lower(monkeypatch: pytest.MonkeyPatch, start_engine: StartEngine) -> None:
    use_standin(monkeypatch)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore of it")

    monkeypatch.setattr("engine.attention.build.PagedKV", full)
    with pytest.raises(OutOfDeviceMemory, match=r"Tried to allocate 20\.00 GiB\. Lower gpu_memory_utilization"):
        start_engine()
    with told_what_to_lower(), pytest.raises(ValueError, match="other"):
        raise ValueError("other")


@pytest.mark.parametrize(("utilization", "pool_tokens"), [(0.75, None), (0.9, None), (0.9, 64)])
async def test_the_pool_fills_what_is_left(
    utilization: float, pool_tokens: int | None, monkeypatch: pytest.MonkeyPatch, start_engine: StartEngine
) -> None:
    """A token of the small model takes 3 layers * 2 * 2 heads * 16 elements * 4 bytes = 768; a half of the
    card's 64 MiB is in use."""
    device = use_standin(monkeypatch)
    engine = start_engine(gpu_memory_utilization=utilization, pool_tokens=pool_tokens, max_running=2)
    expected = pool_tokens or (int(2**26 * utilization) - 2**25) // 768
    assert engine.info.num_pages == expected // 16
    assert engine.info.device == "cpu"
    assert device.steps == 1
    assert device.own > 0
    assert len((await generate(engine, [5, 6, 7], max_tokens=3, ignore_eos=True)).ids) == 3


def test_a_draft_model_wants_room_too(
    monkeypatch: pytest.MonkeyPatch, start_engine: StartEngine, tiny: tuple[Path, PreTrainedModel]
) -> None:
    """As much as the model itself, since it is the same."""
    device = use_standin(monkeypatch)
    engine = start_engine(gpu_memory_utilization=0.75, speculation="draft", draft_model=str(tiny[0]))
    assert engine.info.num_pages == (device.total * 3 // 4 - device.used) // (2 * 768) // 16


def test_no_room_is_told(monkeypatch: pytest.MonkeyPatch, start_engine: StartEngine) -> None:
    device = use_standin(monkeypatch)
    device.used = device.total
    with pytest.raises(OutOfDeviceMemory, match="are in use before there is room"):
        start_engine()


async def test_the_choice_is_logged_once(
    start_engine: StartEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="engine")
    engine = start_engine(device="cpu", attention="torch", pool_tokens=256)
    await generate(engine, [5, 6, 7], max_tokens=3)
    told = [record.getMessage() for record in caplog.records]
    assert told.count("device cpu: asked for") == 1
    assert told.count("attention torch-paged: asked for") == 1


def test_a_standin_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Device = use_standin(monkeypatch)
    assert isinstance(device, StandinDevice)
