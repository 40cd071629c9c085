"""How the small integer arrays of a step get to the device, and when their host memory may be written again.

On CUDA a copy from pinned memory returns before it has been made. Whoever writes the next step's arrays into that
memory too early changes what the running step reads. So each step ends with a fence, and the next one waits for it:

    step n      write -> send -> plan -> fence --.          the copies run here, in the order of the stream
    step n + 1                                    `--> wait -> write -> send -> ...

FlashInfer's wrappers copy from pinned memory of their own in `plan`, and do not wait: the same fence serves them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 4  # in elements: 16 bytes, so that no array shares a vector load with its neighbour


class Fence(Protocol):
    def wait(self) -> None:
        """Returns once everything that was sent before the fence has arrived."""
        ...


class Transfers(Protocol):
    """Copies between host and device, in the order in which they were asked for."""

    def host(self, size: int) -> torch.Tensor:
        """Zeros, [size] int32, in memory from which `send`, and to which `receive`, can copy without waiting."""
        ...

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """source: of `host`. May return before it has been read."""
        ...

    def receive(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """target: of `host`. May return before it has been written."""
        ...

    def fence(self) -> Fence: ...


class DirectTransfers:
    """For the CPU: a copy has been made when `send` returns."""

    def host(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    def receive(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    def fence(self) -> Fence:
        return _Passed()


class CudaTransfers:
    """On the stream that is current when each is called, which has to be the same for all."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def host(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def receive(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def fence(self) -> Fence:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return _Recorded(event)


def transfers_for(device: torch.device) -> Transfers:
    return CudaTransfers(device) if device.type == "cuda" else DirectTransfers()


@dataclass(frozen=True, slots=True)
class Staged:
    """One array in both places: `host` must not be written, and is good until the next step."""

    host: torch.Tensor
    device: torch.Tensor


class Staging:
    """The arrays of one step after the other, each step in one copy. Both buffers grow and stay where they are else."""

    def __init__(self, transfers: Transfers, device: torch.device, size: int = 1 << 14) -> None:
        """size: of the buffers at first, in elements."""
        self._transfers = transfers
        self._device = device
        self._fence: Fence = _Passed()
        self._host, self._on_device = self._buffers(size)

    @contextmanager
    def step(self, arrays: Sequence[npt.NDArray[np.int32]]) -> Iterator[list[Staged]]:
        """Sends the arrays; inside the context, what reads their host memory may be started too."""
        self._fence.wait()
        offsets = np.cumsum([0, *(-(-len(array) // _ALIGNMENT) * _ALIGNMENT for array in arrays)]).tolist()
        if offsets[-1] > len(self._host):
            self._host, self._on_device = self._buffers(2 * offsets[-1])
        target = self._host.numpy()
        for array, offset in zip(arrays, offsets, strict=False):
            target[offset : offset + len(array)] = array
        try:
            self._transfers.send(self._host[: offsets[-1]], self._on_device[: offsets[-1]])
            spans = [slice(offset, offset + len(array)) for array, offset in zip(arrays, offsets, strict=False)]
            yield [Staged(self._host[span], self._on_device[span]) for span in spans]
        finally:
            self._fence = self._transfers.fence()

    def _buffers(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode(False):  # what is made within that mode cannot be written outside of it
            return self._transfers.host(size), torch.zeros(size, dtype=torch.int32, device=self._device)


class _Passed:
    def wait(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Recorded:
    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()
