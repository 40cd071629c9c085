"""A step's numbers on their way to the model's device, and what it gives on its way back: one copy each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.transfers import DirectTransfers, Fence, Staging, Transfers, transfers_for

_IN_FLIGHT = 2


class Arrival(Protocol):
    def wait(self) -> list[torch.Tensor]:
        """What was fetched, in host memory, once it is computed. Good until the second fetch after its own."""
        ...


class Link(Protocol):
    """Between the host and one device. One thread. What it sends and fetches is in order with what is computed."""

    def send(self, arrays: Sequence[npt.NDArray[np.int32]]) -> list[torch.Tensor]:
        """int32 on the device, good until the next step is sent. May return before they are there."""
        ...

    def fetch(self, results: Sequence[torch.Tensor]) -> Arrival:
        """results: int32 or float32. Returns before they are computed."""
        ...


@dataclass(frozen=True, slots=True)
class _Here:
    results: list[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        return self.results


class HostLink:
    """Where the model runs in host memory: nothing is copied."""

    def send(self, arrays: Sequence[npt.NDArray[np.int32]]) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def fetch(self, results: Sequence[torch.Tensor]) -> Arrival:
        return _Here(list(results))


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    fence: Fence
    results: list[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        self.fence.wait()
        return self.results


class StagedLink:
    """Through memory that copies are made from, and to, without waiting; it is kept from step to step."""

    def __init__(self, transfers: Transfers, device: torch.device) -> None:
        self._transfers = transfers
        self._staging = Staging(transfers, device)
        self._buffers = [transfers.host(0) for _ in range(_IN_FLIGHT)]

    def send(self, arrays: Sequence[npt.NDArray[np.int32]]) -> list[torch.Tensor]:
        with self._staging.step(arrays) as staged:
            return [one.device for one in staged]

    def fetch(self, results: Sequence[torch.Tensor]) -> Arrival:
        ends = np.cumsum([result.numel() for result in results]).tolist()
        buffer = self._buffers.pop(0)
        if len(buffer) < ends[-1]:
            buffer = self._transfers.host(ends[-1])  # of elements of four bytes
        self._buffers.append(buffer)
        targets = []
        for result, end in zip(results, ends, strict=True):
            target = buffer[end - result.numel() : end].view(result.dtype).view(result.shape)
            if result.numel():
                self._transfers.receive(result.contiguous(), target)
            targets.append(target)
        return _OnItsWay(self._transfers.fence(), targets)


def link_to(device: torch.device) -> Link:
    transfers = transfers_for(device)
    return HostLink() if isinstance(transfers, DirectTransfers) else StagedLink(transfers, device)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """As `Model.forward` wants them: int64, on the device. Good until the next step is sent."""

    tokens: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor


def send_inputs(link: Link, tokens: Sequence[int], positions: Sequence[int], logit_rows: Sequence[int]) -> StepInputs:
    sent = link.send([np.array(numbers, dtype=np.int32) for numbers in (tokens, positions, logit_rows)])
    return StepInputs(*(numbers.long() for numbers in sent))
