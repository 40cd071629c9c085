"""CUDA graphs for tests: what is launched while one is captured is launched again, on the same memory, at each replay.

No Python runs in a replay, as on a card: whatever the captured code looked up is as it was when it was captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.support.flashinfer_standin.stream import Stream, T

_WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default)


@dataclass(frozen=True)
class _Launch:
    """outputs: where the first run left its results."""

    run: Callable[[], Any]
    outputs: list[torch.Tensor]

    def again(self) -> None:
        for old, new in zip(self.outputs, _tensors(self.run()), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream
        self.launches: list[_Launch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in _WAITS, f"{func} waits for the device: that cannot be captured"
        run = partial(func, *args, **(kwargs or {}))
        output = run()
        self.launches.append(_Launch(run, _tensors(output)))
        return output

    def opaque(self, kernel: Callable[[], T]) -> T:
        with _disable_current_modes():
            output = kernel()
        self.launches.append(_Launch(kernel, _tensors(output)))
        return output


@dataclass(frozen=True, eq=False)
class StandinGraph:
    launches: list[_Launch]
    output: torch.Tensor

    def replay(self) -> None:
        for launch in self.launches:
            launch.again()


class StandinGraphs:
    """See engine.graphs.GraphMaker. captured: how many there have been; alive: those that somebody still has."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.captured = 0
        self.alive: WeakSet[StandinGraph] = WeakSet()

    def capture(self, run: Callable[[], torch.Tensor]) -> StandinGraph:
        run()
        recorder = _Recorder(self._stream)
        self._stream.recorder = recorder
        try:
            with recorder:
                output = run()
        finally:
            self._stream.recorder = None
        self.captured += 1
        graph = StandinGraph(recorder.launches, output)
        self.alive.add(graph)
        return graph


def _tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
