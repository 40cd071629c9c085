"""Copies from and to pinned host memory, which are in flight until somebody has waited for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")

_NAN = 0x7FC0_DEAD
"""As float32; as a token, none of any vocabulary."""


class Recorder(Protocol):
    def opaque(self, kernel: Callable[[], T]) -> T:
        """Runs it, and again at each replay."""
        ...


@dataclass
class _Copy:
    number: int
    source: torch.Tensor
    content: torch.Tensor


@dataclass
class _Receipt:
    number: int
    target: torch.Tensor
    content: torch.Tensor


@dataclass
class Stream:
    """The device's only one. `arrived`: the number of the last copy that somebody waited for. receipts: what is on its
    way to host memory, which holds NaN until then. pinned: host memory by its address. recorder: who captures what is
    launched. written: of each layer's pages, by their address, those that a step has written to last."""

    issued: int = 0
    arrived: int = 0
    in_flight: list[_Copy] = field(default_factory=list)
    receipts: list[_Receipt] = field(default_factory=list)
    pinned: dict[int, torch.Tensor] = field(default_factory=dict)
    recorder: Recorder | None = None
    written: dict[int, set[int]] = field(default_factory=dict)

    def launch(self, kernel: Callable[[], T]) -> T:
        """A kernel reads and writes when it is launched, and when a graph that captured it is replayed."""
        return kernel() if self.recorder is None else self.recorder.opaque(kernel)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned

    def copy_from(self, source: torch.Tensor) -> int:
        """A copy from host memory begins; gives its number."""
        assert self.recorder is None, "a copy from host memory would be captured with what is there now"
        self.check()
        self.issued += 1
        if self.is_pinned(source):
            self.in_flight.append(_Copy(self.issued, source, source.clone()))
        return self.issued

    def copy_to(self, content: torch.Tensor, target: torch.Tensor) -> None:
        """A copy to host memory begins."""
        assert self.recorder is None, "a copy to host memory would be captured with what is there now"
        self.check()
        self.issued += 1
        self.receipts.append(_Receipt(self.issued, target, content.clone()))
        target.view(torch.int32).fill_(_NAN)

    def check(self) -> None:
        for copy in self.in_flight:
            assert torch.equal(copy.source, copy.content), "host memory was written while it was being copied from"

    def wait_for(self, number: int) -> None:
        self.check()
        self.arrived = max(self.arrived, number)
        self.in_flight = [copy for copy in self.in_flight if copy.number > number]
        for receipt in self.receipts:
            if receipt.number <= number:
                with torch.inference_mode():
                    receipt.target.copy_(receipt.content)
        self.receipts = [receipt for receipt in self.receipts if receipt.number > number]


@dataclass
class StandinFence:
    stream: Stream
    number: int

    def wait(self) -> None:
        self.stream.wait_for(self.number)


@dataclass
class StandinTransfers:
    """See engine.attention.transfers.Transfers."""

    stream: Stream

    def host(self, size: int) -> torch.Tensor:
        tensor = torch.zeros(size, dtype=torch.int32)
        self.stream.pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert self.stream.is_pinned(source), "a copy from pageable memory waits for the device"
        assert not self.stream.is_pinned(target)
        self.stream.copy_from(source)
        target.copy_(source)

    def receive(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert not self.stream.is_pinned(source)
        assert self.stream.is_pinned(target), "a copy to pageable memory waits for the device"
        assert source.dtype == target.dtype, "a copy that converts goes by way of another one"
        self.stream.copy_to(source, target)

    def fence(self) -> StandinFence:
        return StandinFence(self.stream, self.stream.issued)
