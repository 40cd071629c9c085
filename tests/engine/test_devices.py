"""Which device a model runs on, and what it is told there. No card is needed: torch's answers are put in its mouth."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import PreTrainedModel

from engine.config import DeviceWish, EngineConfig, KVDtype, Speculation, WeightsDtype
from engine.devices import CpuDevice, CudaDevice, Device, dtype_named, find_device, name_of, told_what_to_lower
from engine.errors import DeviceUnavailable, ModelError, OutOfDeviceMemory
from engine.graphs import Captured, Run
from engine.loading import load_engine
from engine.models.elementwise import CpuElementwise, Elementwise, TorchElementwise
from engine.models.fused import FlashInferElementwise
from engine.runner import ModelRunner
from engine.speculation import Drafter, NgramDrafter
from engine.speculation.draft_model import ModelDrafter
from engine.speculation.loading import load_drafter
from tests.engine.conftest import StartEngine
from tests.support.generation import generate
from tests.support.standin_device import GRAPH_BYTES, StandinDevice, use_standin

GIB = 2**30
WORKSPACE_BYTES = 2 * 2 * 4 * 128 * (16 + 1)
"""For the two query heads that share a head of keys of 16 elements, on a card that works on one block at a time."""
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
    with pytest.raises(DeviceUnavailable, match=r"torch finds none: it .*; choose auto or cpu"):
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
        (CUDA, True, "auto", "fp8", "bfloat16", torch.float8_e4m3fn),
        (CUDA, True, "int8", "auto", "int8", torch.bfloat16),
        (CUDA, False, "int8", "auto", "int8", torch.float16),
        (CUDA, True, "fp8", "auto", "fp8", torch.bfloat16),
        (CUDA, True, "fp8", "fp8", "fp8", torch.float8_e4m3fn),
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
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (9, 0) if bf16 else (7, 5))
    assert device.layout(dtype).name == weights
    assert device.kv(kv_dtype, weights) == kv


@pytest.mark.parametrize(
    ("dtype", "bf16", "folder", "dense"),
    [
        ("int8", True, "rowwise-int8-bfloat16", torch.bfloat16),
        ("int8", False, "rowwise-int8-float16", torch.float16),
        ("fp8", True, "rowwise-fp8-bfloat16", torch.bfloat16),
        ("bfloat16", True, "bfloat16", torch.bfloat16),
    ],
)
def test_copies_for_a_card(
    dtype: WeightsDtype, bf16: bool, folder: str, dense: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's int8 is another layout in another folder, beside float32."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (9, 0))
    layout = CUDA.layout(dtype)
    assert (layout.folder, layout.dense, layout.bits) == (folder, dense, None)
    assert CPU.layout("int8").folder == "int8"


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "message"),
    [
        (CUDA, "int4", (9, 0), "int4 weights are for the CPU: on CUDA, choose int8, fp8, bfloat16, float16 or float32"),
        (CUDA, "fp8", (8, 6), r"fp8 weights need .* 8\.9 or newer, and this one has 8\.6: choose int8 or bfloat16"),
        (CUDA, "fp8", (7, 5), "and this one has 7.5: choose int8 or float16"),
        (CUDA, "int8", (7, 0), r"int8 weights need .* 7\.5 or newer, and this one has 7\.0: choose float16"),
        (CPU, "fp8", (9, 0), "fp8 weights are for CUDA: on the CPU, choose int4, int8, bfloat16 or float32"),
    ],
)
def test_weights_that_a_device_does_not_multiply(
    device: Device,
    dtype: WeightsDtype,
    capability: tuple[int, int],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: capability >= (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: capability)
    with pytest.raises(ModelError, match=message):
        device.layout(dtype)


def test_narrow_weights_of_the_first_cards_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    for dtype, capability in (("int8", (7, 5)), ("fp8", (8, 9))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place, found=capability: found)
        assert CUDA.layout(dtype).name == dtype


@pytest.mark.parametrize(
    ("device", "kv_dtype", "message"),
    [
        (CPU, "fp8", "fp8 keys and values are for CUDA: on the CPU, choose int8"),
        (CpuDevice("torch"), "fp8", "fp8 keys and values are for CUDA"),
        (CUDA, "int8", "int8 keys and values are for the CPU: on CUDA, choose fp8"),
    ],
)
def test_keys_and_values_of_another_device(device: Device, kv_dtype: KVDtype, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        device.kv(kv_dtype, "bfloat16")


@pytest.mark.parametrize(
    ("device", "wish", "guesses"),
    [
        (CPU, "auto", "ngram"),
        (CUDA, "auto", "off"),
        *((device, wish, wish) for device in (CPU, CUDA) for wish in ("off", "ngram", "draft")),
    ],
)
def test_who_guesses(device: Device, wish: Speculation, guesses: Speculation) -> None:
    assert device.speculation(wish) == guesses


@pytest.mark.parametrize("name", [name for name in get_args(KVDtype) if name != "auto"])
def test_names_of_types(name: str) -> None:
    assert name_of(dtype_named(name)) == name


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


def test_the_room_of_a_card_is_measured_within_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes counts as in use, its keys and values do not."""
    free = [50 * GIB]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 80 * GIB))

    @contextmanager
    def trial() -> Iterator[int]:
        free[0] -= 5 * GIB
        yield GIB
        free[0] += 5 * GIB

    room = CUDA.room(0.9, trial)
    assert free == [50 * GIB]
    assert (room.usual, room.most) == (72 * GIB - 34 * GIB, 46 * GIB)


def test_out_of_memory_says_what_to_lower(monkeypatch: pytest.MonkeyPatch, start_engine: StartEngine) -> None:
    use_standin(monkeypatch)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore of it")

    monkeypatch.setattr("engine.attention.build.PagedKV", full)
    with pytest.raises(OutOfDeviceMemory, match=r"Tried to allocate 20\.00 GiB\. Lower gpu_memory_utilization"):
        start_engine()


def test_other_errors_stay_as_they_are() -> None:
    for error in (ValueError("other"), RuntimeError("out of memory, says somebody else"), torch.AcceleratorError("x")):
        with pytest.raises(type(error)) as raised, told_what_to_lower():
            raise error
        assert raised.value is error


def by_torch() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it")


def by_cuda() -> None:
    raise torch.AcceleratorError("CUDA error: out of memory\nMore of it")


def by_the_end_of_the_capture() -> None:
    """As torch.cuda.graph does: leaving it ends the capture, which fails for what has failed before."""
    try:
        by_torch()
    finally:
        raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        (by_torch, r"Tried to allocate 2\.00 GiB"),
        (by_cuda, "CUDA error: out of memory"),
        (by_the_end_of_the_capture, r"Tried to allocate 2\.00 GiB"),
    ],
)
def test_out_of_memory_while_graphs_are_captured(
    monkeypatch: pytest.MonkeyPatch, start_engine: StartEngine, fails: Callable[[], None], told: str
) -> None:
    device = use_standin(monkeypatch)
    capture, captured = device.maker.capture, []

    def second_fails(run: Run) -> Captured:
        if captured:
            fails()
        captured.append(capture(run))
        return captured[-1]

    monkeypatch.setattr(device.maker, "capture", second_fails)
    with pytest.raises(OutOfDeviceMemory, match=told + r"\. Lower gpu_memory_utilization, .*max_running"):
        start_engine(pool_tokens=256)
    assert len(captured) == 1


@pytest.mark.parametrize(("utilization", "pool_tokens"), [(0.75, None), (0.9, None), (0.9, 64)])
async def test_the_pool_fills_what_is_left(
    utilization: float, pool_tokens: int | None, monkeypatch: pytest.MonkeyPatch, start_engine: StartEngine
) -> None:
    """A token of the small model takes 3 layers * 2 * 2 heads * 16 elements * 4 bytes = 768; a half of the
    card's 64 MiB is in use, and three graphs and a workspace take their part."""
    device = use_standin(monkeypatch)
    engine = start_engine(gpu_memory_utilization=utilization, pool_tokens=pool_tokens, max_running=2)
    taken = 3 * GRAPH_BYTES + WORKSPACE_BYTES
    expected = pool_tokens or (int(2**26 * utilization) - 2**25 - taken) // 768
    assert engine.info.num_pages == expected // 16
    assert engine.info.device == "cpu"
    assert (device.trials, device.taken, device.own) == (1, taken, 2 * 9 * 16 * 768)  # twice 128 tokens and one more
    assert len((await generate(engine, [5, 6, 7], max_tokens=3, ignore_eos=True)).ids) == 3


def test_a_draft_model_wants_room_too(
    monkeypatch: pytest.MonkeyPatch, start_engine: StartEngine, tiny: tuple[Path, PreTrainedModel]
) -> None:
    """Its keys and values as much as those of the model itself, since it is the same; and a workspace of its own. The
    largest step of either is a prompt of 256 tokens, one more of the model, and two of the draft model."""
    device = use_standin(monkeypatch)
    engine = start_engine(gpu_memory_utilization=0.75, max_running=1, speculation="draft", draft_model=str(tiny[0]))
    taken = GRAPH_BYTES + 2 * WORKSPACE_BYTES
    assert (device.taken, device.own) == (taken, 2 * 17 * 16 * 768)
    assert engine.info.num_pages == (device.total * 3 // 4 - device.used - taken) // (2 * 768) // 16


def test_a_trial_ends_with_the_largest_step(monkeypatch: pytest.MonkeyPatch, start_engine: StartEngine) -> None:
    """A capture gives back what torch has taken for steps: what comes before it would not be seen."""
    device, done = use_standin(monkeypatch), []
    capture, try_out = device.maker.capture, ModelRunner.try_out

    def captured(run: Run) -> Captured:
        done.append("capture")
        return capture(run)

    def tried_out(runner: ModelRunner, lengths: Sequence[int], page_size: int) -> None:
        done.append(f"{len(lengths)} prompts, {sum(lengths)} tokens")
        try_out(runner, lengths, page_size)

    monkeypatch.setattr(device.maker, "capture", captured)
    monkeypatch.setattr(ModelRunner, "try_out", tried_out)
    start_engine(max_running=2, max_batched_tokens=40)
    assert done == ["capture"] * 3 + ["2 prompts, 40 tokens"] + ["capture"] * 3 + ["1 prompts, 16 tokens"]
    assert len(device.maker.alive) == 3


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


@pytest.mark.parametrize(
    ("on_a_card", "options", "kind"),
    [
        (False, {}, NgramDrafter),
        (False, {"speculation": "off"}, type(None)),
        (True, {}, type(None)),
        (True, {"speculation": "ngram"}, NgramDrafter),
        (False, {"draft_model": "itself"}, ModelDrafter),
        (True, {"draft_model": "itself"}, ModelDrafter),
        (True, {"draft_model": "itself", "speculation": "draft"}, ModelDrafter),
    ],
)
def test_the_drafter_of_an_engine(
    monkeypatch: pytest.MonkeyPatch,
    start_engine: StartEngine,
    tiny: tuple[Path, PreTrainedModel],
    on_a_card: bool,
    options: dict[str, Any],
    kind: type[Drafter | None],
) -> None:
    if on_a_card:
        use_standin(monkeypatch)
    drafters: list[Drafter | None] = []

    def load(*args: Any) -> Drafter | None:
        drafters.append(load_drafter(*args))
        return drafters[-1]

    monkeypatch.setattr("engine.loading.load_drafter", load)
    if "draft_model" in options:
        options = {**options, "draft_model": str(tiny[0])}
    start_engine(pool_tokens=256, **options)
    assert [type(drafter) for drafter in drafters] == [kind]
