"""A step's numbers on their way to the model's device, and its logits on their way back: one copy each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.attention.transfers import DirectTransfers, Staging, Transfers, transfers_for


@dataclass(frozen=True, slots=True)
class StepInputs:
    """As `Model.forward` wants them: int64, on the device. Good until the next step is sent."""

    tokens: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor


class Link(Protocol):
    """Between the host and one device. One thread."""

    def send(self, tokens: Sequence[int], positions: Sequence[int], logit_rows: Sequence[int]) -> StepInputs: ...

    def fetch(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [S, vocab] float32 in host memory, once they are computed. Good until the next call."""
        ...


class HostLink:
    """Where the model runs in host memory: nothing is copied."""

    def send(self, tokens: Sequence[int], positions: Sequence[int], logit_rows: Sequence[int]) -> StepInputs:
        flat = torch.from_numpy(np.array((tokens, positions), dtype=np.int64))
        return StepInputs(flat[0], flat[1], torch.from_numpy(np.array(logit_rows, dtype=np.int64)))

    def fetch(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


class StagedLink:
    """Through memory that copies are made from, and to, without waiting; it is kept from step to step."""

    def __init__(self, transfers: Transfers, device: torch.device) -> None:
        self._transfers = transfers
        self._staging = Staging(transfers, device)
        self._logits = transfers.host(0)

    def send(self, tokens: Sequence[int], positions: Sequence[int], logit_rows: Sequence[int]) -> StepInputs:
        arrays = [np.array(numbers, dtype=np.int32) for numbers in (tokens, positions, logit_rows)]
        with self._staging.step(arrays) as staged:
            return StepInputs(*(one.device.long() for one in staged))

    def fetch(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.numel() == 0:
            return torch.empty(logits.shape)
        if len(self._logits) < logits.numel():
            self._logits = self._transfers.host(logits.numel())  # of elements of four bytes
        target = self._logits[: logits.numel()].view(torch.float32).view(logits.shape)
        self._transfers.receive(logits.contiguous(), target)
        self._transfers.fence().wait()
        return target


def link_to(device: torch.device) -> Link:
    transfers = transfers_for(device)
    return HostLink() if isinstance(transfers, DirectTransfers) else StagedLink(transfers, device)
