"""A device on which engines run over the FlashInfer stand-in, in float32, as they would on a card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from engine.attention import Choice
from engine.config import KVDtype, Speculation, WeightsDtype
from engine.devices import dtype_named
from engine.graphs import GraphMaker
from engine.models.elementwise import Elementwise
from engine.models.fused import FlashInferElementwise
from engine.sampling.most_likely import most_likely_by_flashinfer
from engine.sampling.on_device import DeviceChooser
from engine.sizing import Room, device_room
from tests.support import flashinfer_standin
from tests.support.flashinfer_standin import Standin
from tests.support.flashinfer_standin.graphs import StandinGraphs


@dataclass
class StandinDevice:
    """See engine.devices.Device. total, used: bytes of its memory; steps: how often the largest one was tried out."""

    standin: Standin
    total: int = 1 << 26
    used: int = 1 << 25
    place: torch.device = field(default_factory=lambda: torch.device("cpu"))
    reason: str = "a stand-in"
    steps: int = 0
    own: int = 0

    def __post_init__(self) -> None:
        self.maker = StandinGraphs(self.standin.stream)

    def weights(self, wish: WeightsDtype) -> WeightsDtype:
        return "float32" if wish == "auto" else wish

    def kv(self, wish: KVDtype, weights: str) -> torch.dtype:
        packed = weights in ("int4", "int8")
        return dtype_named(("float32" if packed else weights) if wish == "auto" else wish)

    def speculation(self, wish: Speculation) -> Speculation:
        return "off" if wish == "auto" else wish

    def elementwise(self, dtype: torch.dtype) -> Elementwise:
        return FlashInferElementwise(dtype)

    def attention(self, head_dim: int, kv_dtype: torch.dtype) -> Choice:
        return Choice("flashinfer", "a stand-in")

    def room(self, utilization: float, largest_step: Callable[[], int]) -> Room:
        self.steps += 1
        self.own = largest_step()
        return device_room(self.total, self.used, utilization)

    def graphs(self) -> GraphMaker | None:
        return self.maker

    def chooser(self) -> DeviceChooser | None:
        return DeviceChooser(most_likely_by_flashinfer())


def use_standin(monkeypatch: pytest.MonkeyPatch) -> StandinDevice:
    """Engines that are loaded from now on are on such a device."""
    device = StandinDevice(flashinfer_standin.install(monkeypatch))
    monkeypatch.setattr("engine.loading.find_device", lambda wish, attention: device)
    return device
