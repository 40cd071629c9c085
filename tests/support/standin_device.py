"""A device on which engines run over the FlashInfer stand-in, in float32, as they would on a card."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from engine.attention import Choice
from engine.config import KVDtype, Speculation, WeightsDtype
from engine.devices import Trial, dtype_named
from engine.graphs import GraphMaker
from engine.models.elementwise import Elementwise
from engine.models.fused import FlashInferElementwise
from engine.sampling.most_likely import most_likely_by_flashinfer
from engine.sampling.on_device import DeviceChooser
from engine.sizing import Room, device_room
from engine.weights.layout import Layout, cpu_layout, rowwise_layout
from tests.support import flashinfer_standin
from tests.support.flashinfer_standin import Standin
from tests.support.flashinfer_standin.graphs import StandinGraphs

GRAPH_BYTES = 1 << 16
"""What one takes: made up, since on the CPU it takes nothing that could be measured."""


@dataclass
class StandinDevice:
    """See engine.devices.Device. total: bytes of its memory; used: those taken before a trial. trials: how many there
    have been. Of the last one: own, bytes of keys and values; taken, bytes of graphs and workspaces. dense: the type of
    what is not narrow."""

    standin: Standin
    total: int = 1 << 26
    used: int = 1 << 25
    place: torch.device = field(default_factory=lambda: torch.device("cpu"))
    reason: str = "a stand-in"
    trials: int = 0
    own: int = 0
    taken: int = 0
    dense: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.maker = StandinGraphs(self.standin.stream)

    def layout(self, wish: WeightsDtype) -> Layout:
        """int4: as on the CPU, whose kernels compute it."""
        if wish in ("int8", "fp8"):
            return rowwise_layout(wish, self.dense)
        return Layout(self.dense) if wish == "auto" else cpu_layout(wish)

    def kv(self, wish: KVDtype, weights: str) -> torch.dtype:
        narrow = weights in ("int4", "int8", "fp8")
        return (self.dense if narrow else dtype_named(weights)) if wish == "auto" else dtype_named(wish)

    def speculation(self, wish: Speculation) -> Speculation:
        return "off" if wish == "auto" else wish

    def elementwise(self, dtype: torch.dtype) -> Elementwise:
        return FlashInferElementwise(dtype)

    def attention(self, head_dim: int, kv_dtype: torch.dtype) -> Choice:
        return Choice("flashinfer", "a stand-in")

    def room(self, utilization: float, trial: Trial) -> Room:
        self.trials += 1
        before = self._in_use()
        with trial() as self.own:
            self.taken = self._in_use() - before
        return device_room(self.total, self.used + self.taken, utilization)

    def _in_use(self) -> int:
        return len(self.maker.alive) * GRAPH_BYTES + sum(map(len, self.standin.workspaces.values()))

    def graphs(self) -> GraphMaker | None:
        return self.maker

    def chooser(self) -> DeviceChooser | None:
        return DeviceChooser(most_likely_by_flashinfer())


def use_standin(monkeypatch: pytest.MonkeyPatch) -> StandinDevice:
    """Engines that are loaded from now on are on such a device."""
    device = StandinDevice(flashinfer_standin.install(monkeypatch))
    monkeypatch.setattr("engine.loading.find_device", lambda wish, attention: device)
    return device
