"""Tensors that say they are on a card, and are in host memory: what a card would refuse, or wait for, is refused here.

What a tensor holds is known, so that whole steps are computed. Refused are operations with tensors of both places, and
whatever lets the host wait for the device: reading what a tensor holds, masks, copies from and to pageable memory.
Kernels themselves, and which types each of them has in CUDA, are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from engine.local import LocalEngine

CARD = torch.device("cuda", 0)

_aten = torch.ops.aten
_WAITS = {
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.equal.default,
    _aten.masked_select.default,
    _aten.is_nonzero.default,
}
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}


class Waits(AssertionError):
    """The host would wait for the device."""


class OnCard(torch.Tensor):
    """held: what it holds, on the CPU, where torch's own code believes it to be."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnCard:
        options = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        tensor: OnCard = torch.Tensor._make_wrapper_subclass(cls, held.shape, **options)  # type: ignore[attr-defined]
        tensor.held = held
        return tensor

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CARD

    def tolist(self) -> Any:
        _wait("tolist")
        return self.held.tolist()

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        _wait("cpu")
        return self.held.clone()

    def new_tensor(self, data: Any) -> OnCard:  # type: ignore[override]
        _wait("new_tensor")
        return OnCard(self.held.new_tensor(data))

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def numpy(self) -> Any:  # type: ignore[override]
        raise TypeError("a tensor of a card is no array")

    def __getitem__(self, index: Any) -> OnCard:
        return OnCard(self.held[_held_index(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor) and not isinstance(value, OnCard):
            _wait("a copy from pageable memory")
        self.held[_held_index(index)] = value.held if isinstance(value, OnCard) else value

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class AsOnCuda(TorchDispatchMode):
    """Within it, in its thread, what is asked for on the card is made there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Rules:
    """Of one test: `use_card` makes them anew. waits: whether the host may. pinned: host memory by its address."""

    waits: ClassVar[bool] = False
    pinned: ClassVar[dict[int, torch.Tensor]] = {}


@contextmanager
def waiting() -> Iterator[None]:
    """Where the host may wait for the device: while a model is loaded."""
    _Rules.waits = True
    try:
        yield
    finally:
        _Rules.waits = False


def _wait(what: str) -> None:
    if not _Rules.waits:
        raise Waits(f"{what} waits for the device")


def _held_index(index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        if isinstance(part, torch.Tensor) and not isinstance(part, OnCard):
            _wait("an index in pageable memory")
        elif isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8):
            _wait("a mask")
        elif isinstance(part, list | np.ndarray):
            _wait("an index in host memory")
    held = tuple(part.held if isinstance(part, OnCard) else part for part in parts)
    return held if isinstance(index, tuple) else held[0]


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        with AsOnCuda():  # in parts, of which each is looked at
            output = func.decompose(*args, **kwargs)
        if output is not NotImplemented:
            return output
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    cards = [tensor for tensor in tensors if isinstance(tensor, OnCard)]
    others = [tensor for tensor in tensors if not isinstance(tensor, OnCard)]
    wish = kwargs.get("device")
    here = bool(cards) if wish is None else torch.device(wish).type == "cuda"
    if wish is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if func in _WAITS and cards:
        _wait(str(func))
    if func is _aten.copy_.default and cards:
        here = isinstance(args[0], OnCard)
        if others:
            _check_copy(args[0], args[1], bool(kwargs.get("non_blocking", len(args) > 2 and args[2])))
    elif func is _aten._to_copy.default and here != bool(cards):
        _wait("a copy to or from the card")
    elif cards and (func in _INDEXING or any(other.dim() for other in others)) and others:
        raise RuntimeError(f"{func}: tensors on the card and on the CPU")
    if func in _INDEXING and any(isinstance(index, OnCard) and index.dtype == torch.bool for index in args[1]):
        _wait("a mask")
    held_args, held_kwargs = pytree.tree_map_only(OnCard, lambda card: card.held, (args, kwargs))
    output = func(*held_args, **held_kwargs)
    if not here:
        return output
    known = {id(card.held): card for card in cards}
    return pytree.tree_map_only(
        torch.Tensor, lambda held: known[id(held)] if id(held) in known else OnCard(held), output
    )


def _check_copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    host = source if isinstance(target, OnCard) else target
    if not non_blocking or target.dtype != source.dtype or host.untyped_storage().data_ptr() not in _Rules.pinned:
        _wait("a copy between pageable memory and the card, or one that converts,")


class _Passed:
    def wait(self) -> None:
        pass


class CardTransfers:
    """See engine.attention.transfers.CudaTransfers."""

    def host(self, size: int) -> torch.Tensor:
        tensor = torch.zeros(size, dtype=torch.int32)
        _Rules.pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    receive = send

    def fence(self) -> _Passed:
        return _Passed()


def use_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on CudaDevice(CARD, "torch", ...) is such a card, without graphs, also in the threads of engines."""
    cuda: dict[str, Callable[..., Any]] = {
        "_lazy_init": lambda: None,
        "is_bf16_supported": lambda **_: True,
        "get_device_capability": lambda device: (9, 0),
        "empty_cache": lambda: None,
        "synchronize": lambda device: None,
        "mem_get_info": lambda device: (1 << 30, 1 << 31),
    }
    monkeypatch.setattr(_Rules, "waits", False)
    monkeypatch.setattr(_Rules, "pinned", {})
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("engine.attention.transfers.CudaTransfers", lambda device: CardTransfers())
    monkeypatch.setattr("engine.attention.torch_paged.find_varlen", lambda *_: None)
    monkeypatch.setattr("engine.devices.CudaGraphs", lambda place: None)
    run = LocalEngine._run

    def as_on_cuda(engine: LocalEngine) -> None:
        with AsOnCuda():
            run(engine)

    monkeypatch.setattr(LocalEngine, "_run", as_on_cuda)
