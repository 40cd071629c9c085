"""Where a model runs, and what is different there: types, kernels, memory. Everybody else is told by this.

A device is chosen once, when an engine is loaded (`find_device`).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.choice import Choice, choose, has_flashinfer, installed
from engine.attention.kv_scales import FP8
from engine.config import AttentionWish, DeviceWish, KVDtype, Speculation, WeightsDtype
from engine.errors import DeviceLost, DeviceUnavailable, ModelError, OutOfDeviceMemory
from engine.graphs import CudaGraphs, GraphMaker
from engine.models.elementwise import CpuElementwise, Elementwise, TorchElementwise
from engine.models.fused import FlashInferElementwise
from engine.sampling.most_likely import SortedMostLikely, most_likely_by_flashinfer
from engine.sampling.on_device import DeviceChooser
from engine.sizing import Room, device_room, host_room
from engine.weights.layout import Layout, cpu_layout, dense_layout, rowwise_layout

_NEEDED_FOR: Mapping[WeightsDtype, tuple[int, int]] = {"int8": (7, 5), "fp8": (8, 9)}
"""The compute capability from which on a card multiplies such weights."""

Trial = Callable[[], AbstractContextManager[int]]
"""Tries out all that takes memory: graphs, workspaces, a step as large as there will be. Within the context all of it
is there. Gives the bytes of the keys and values among that, which belong to the trial alone."""


class Device(Protocol):
    """One device, for as long as an engine lives. reason: why it is this one, for the log."""

    @property
    def place(self) -> torch.device: ...

    @property
    def reason(self) -> str: ...

    def layout(self, wish: WeightsDtype) -> Layout:
        """How weights are kept for what was wished for. Raises ModelError where there is no such product."""
        ...

    def kv(self, wish: KVDtype, weights: str) -> torch.dtype:
        """The type of keys and values beside such weights. Raises ModelError where it is for another device."""
        ...

    def speculation(self, wish: Speculation) -> Speculation:
        """Who guesses tokens for what was wished for, never auto."""
        ...

    def elementwise(self, dtype: torch.dtype) -> Elementwise:
        """What a decoder computes between its products, whose results are of this type."""
        ...

    def attention(self, head_dim: int, kv_dtype: torch.dtype) -> Choice:
        """Raises AttentionUnavailable where what was wished for cannot be."""
        ...

    def room(self, utilization: float, trial: Trial) -> Room:
        """For keys and values, once the weights are there.

        utilization: the share of the device's memory that may be in use by then, where it has memory of its own.
        trial: shows how much everything but keys and values takes; it is over when this returns.
        """
        ...

    def graphs(self) -> GraphMaker | None:
        """Who captures what is run; None: that gains nothing here."""
        ...

    def chooser(self) -> DeviceChooser | None:
        """Who chooses tokens where the logits are; None: they are in host memory already."""
        ...


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """Weights are packed unless told otherwise, and memory is shared with everybody else."""

    wish: AttentionWish = "auto"
    reason: str = "asked for"

    @property
    def place(self) -> torch.device:
        return torch.device("cpu")

    def layout(self, wish: WeightsDtype) -> Layout:
        return cpu_layout(wish)

    def kv(self, wish: KVDtype, weights: str) -> torch.dtype:
        if wish == "fp8":
            raise ModelError("fp8 keys and values are for CUDA: on the CPU, choose int8, bfloat16 or float32")
        return dtype_named((weights if weights == "float32" else "bfloat16") if wish == "auto" else wish)

    def speculation(self, wish: Speculation) -> Speculation:
        return "ngram" if wish == "auto" else wish

    def elementwise(self, dtype: torch.dtype) -> Elementwise:
        return CpuElementwise()

    def attention(self, head_dim: int, kv_dtype: torch.dtype) -> Choice:
        return choose(self.wish, self.place, (), head_dim, kv_dtype)

    def room(self, utilization: float, trial: Trial) -> Room:
        return host_room(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def graphs(self) -> GraphMaker | None:
        return None

    def chooser(self) -> DeviceChooser | None:
        return None


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """The card that is current when it is chosen. installed: what there is for attention, see `installed`."""

    place: torch.device
    wish: AttentionWish
    installed: frozenset[str]
    reason: str

    def layout(self, wish: WeightsDtype) -> Layout:
        if wish == "int4":
            raise ModelError("int4 weights are for the CPU: on CUDA, choose int8, fp8, bfloat16, float16 or float32")
        if wish == "auto":
            return dense_layout("bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16")
        if (needed := _NEEDED_FOR.get(wish)) is None:
            return dense_layout(wish)
        dense, there = self.layout("auto"), torch.cuda.get_device_capability(self.place)
        if there < needed:
            narrower = "int8 or " if there >= _NEEDED_FOR["int8"] else ""
            raise ModelError(
                f"{wish} weights need a card of compute capability {_dotted(needed)} or newer, and this one has "
                f"{_dotted(there)}: choose {narrower}{dense.name}"
            )
        return rowwise_layout(wish, dense.dense)

    def kv(self, wish: KVDtype, weights: str) -> torch.dtype:
        if wish == "int8":
            raise ModelError("int8 keys and values are for the CPU: on CUDA, choose fp8, bfloat16, float16 or float32")
        if wish == "auto":
            return self.layout("auto").dense if weights in _NEEDED_FOR else dtype_named(weights)
        return dtype_named(wish)

    def speculation(self, wish: Speculation) -> Speculation:
        """auto: none, since a step with guesses is in no graph."""
        return "off" if wish == "auto" else wish

    def elementwise(self, dtype: torch.dtype) -> Elementwise:
        if self._has_kernels:
            return FlashInferElementwise(dtype)
        return TorchElementwise()

    def attention(self, head_dim: int, kv_dtype: torch.dtype) -> Choice:
        return choose(self.wish, self.place, self.installed, head_dim, kv_dtype)

    def room(self, utilization: float, trial: Trial) -> Room:
        """What torch has taken for the step's numbers counts as in use: it will be again. So do the trial's graphs."""
        torch.cuda.empty_cache()  # what loading has left
        with trial() as own:
            torch.cuda.synchronize(self.place)
            free, total = torch.cuda.mem_get_info(self.place)
        gc.collect()
        torch.cuda.empty_cache()
        return device_room(total, total - free - own, utilization)

    def graphs(self) -> GraphMaker | None:
        return CudaGraphs(self.place)

    def chooser(self) -> DeviceChooser | None:
        return DeviceChooser(most_likely_by_flashinfer() if self._has_kernels else SortedMostLikely())

    @property
    def _has_kernels(self) -> bool:
        return self.wish in ("auto", "flashinfer") and has_flashinfer(self.installed)


def find_device(wish: DeviceWish, attention: AttentionWish) -> Device:
    """auto: CUDA where there is a card. Raises DeviceUnavailable."""
    there = torch.cuda.is_available()
    if wish == "cpu" or (wish == "auto" and not there):
        return CpuDevice(attention, "asked for" if wish == "cpu" else "torch finds no CUDA here")
    if not there:
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        raise DeviceUnavailable(f"the device cuda was asked for, and torch finds none: it {built}; choose auto or cpu")
    card = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(card)
    return CudaDevice(card, attention, installed(), f"asked for, {name}" if wish == "cuda" else name)


@contextmanager
def told_what_to_lower() -> Iterator[None]:
    """What the device's memory did not suffice for becomes an OutOfDeviceMemory, also where it led to another error."""
    try:
        yield
    except RuntimeError as error:
        if (first := _out_of_memory(error)) is None:
            raise
        raise OutOfDeviceMemory(str(first).splitlines()[0].rstrip(".")) from error


@contextmanager
def told_if_lost() -> Iterator[None]:
    """An error after which the device takes nothing any more becomes a DeviceLost; it may come from any kernel that was
    launched before."""
    try:
        yield
    except torch.AcceleratorError as error:
        if _out_of_memory(error) is not None:
            raise
        raise DeviceLost(str(error).splitlines()[0]) from error


def _out_of_memory(error: BaseException | None) -> BaseException | None:
    """The error of torch, or of CUDA itself, behind this one: the end of a capture that ran out of memory raises one of
    its own."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return error
        if isinstance(error, torch.AcceleratorError) and "out of memory" in str(error):
            return error
        error = error.__cause__ or error.__context__
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def dtype_named(name: str) -> torch.dtype:
    """By its name in EngineConfig: torch's own, but for fp8."""
    dtype: torch.dtype = FP8 if name == "fp8" else getattr(torch, name)
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """The inverse of dtype_named."""
    return "fp8" if dtype == FP8 else str(dtype).removeprefix("torch.")
