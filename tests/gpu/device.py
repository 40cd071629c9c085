"""The device that is measured. The CPU is one too, so that all that happens on a card can be tested without."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import torch

Work = Callable[[], object]


class Device(Protocol):
    torch: torch.device
    name: str

    def free_bytes(self) -> int: ...

    def synchronize(self) -> None: ...

    def milliseconds(self, work: Work, repeats: int, warm_up: int = 3) -> float:
        """The median of what `work` takes on the device, waiting for the host included."""
        ...

    def capture(self, work: Work) -> Work:
        """What does the same again, without its host side. `work` is run a few times for that."""
        ...


@dataclass(frozen=True, slots=True)
class Cuda:
    torch: torch.device
    name: str

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.torch)[0])

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch)

    def milliseconds(self, work: Work, repeats: int, warm_up: int = 3) -> float:
        for _ in range(warm_up):
            work()
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in marks:
            begin.record()
            work()
            end.record()
        self.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in marks)

    def capture(self, work: Work) -> Work:
        """Warmed up on another stream, as torch wants it (torch.cuda.graphs)."""
        side = torch.cuda.Stream(self.torch)
        side.wait_stream(torch.cuda.current_stream(self.torch))
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        torch.cuda.current_stream(self.torch).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay


@dataclass(frozen=True, slots=True)
class Host:
    """The CPU. What a graph would replay is simply done again."""

    torch: torch.device = field(default_factory=lambda: torch.device("cpu"))
    name: str = "CPU"
    memory: int = 1 << 30

    def free_bytes(self) -> int:
        return self.memory

    def synchronize(self) -> None:
        pass

    def milliseconds(self, work: Work, repeats: int, warm_up: int = 3) -> float:
        for _ in range(warm_up):
            work()
        taken = []
        for _ in range(repeats):
            started = perf_counter()
            work()
            taken.append(1e3 * (perf_counter() - started))
        return statistics.median(taken)

    def capture(self, work: Work) -> Work:
        return work


def find_device() -> Cuda | None:
    """The first CUDA device; None: there is none."""
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", 0)
    return Cuda(device, torch.cuda.get_device_name(device))
