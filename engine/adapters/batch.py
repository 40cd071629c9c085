"""Several adapters in one step: whose rows are whose, planned once and read by every linear layer.

    rows of the step    base | ann | ann | base | bob | ann
    groups              ann: 1, 2, 5    bob: 4

Rows of no adapter are in no group, so a step without adapters costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from engine.adapters.adapter import Adapter, LowRank
from engine.attention.transfers import Staging, transfers_for
from engine.quant import Linear


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows [start, stop) of a step, or those of `scattered` [R] int64 where they do not stand together."""

    adapter: str
    start: int
    stop: int
    scattered: torch.Tensor | None


class Adapters:
    """The loaded adapters and the groups of the planned step. One thread, like the attention backend beside it."""

    def __init__(self, adapters: Iterable[Adapter] = (), device: torch.device | None = None) -> None:
        """device: of the model; None: the CPU."""
        self._adapters = tuple(adapters)
        self._device = device or torch.device("cpu")
        self._staging = Staging(transfers_for(self._device), self._device) if self._adapters else None
        self._groups: tuple[RowGroup, ...] = ()

    @property
    def groups(self) -> tuple[RowGroup, ...]:
        return self._groups

    def adapt(self, name: str, linear: Linear, dtype: torch.dtype) -> Linear:
        """`linear` itself where no adapter changes the layer of this name. dtype: of its output and of the updates."""
        updates = {a.name: a.updates[name].to(dtype, self._device) for a in self._adapters if name in a.updates}
        return _AdaptedLinear(linear, updates, dtype, self) if updates else linear

    def plan(self, spans: Iterable[tuple[str | None, int]]) -> None:
        """Says for the next step whose its rows are: (adapter or None, number of rows), from the first row on."""
        found: dict[str, list[tuple[int, int]]] = {}
        start = 0
        for adapter, count in spans:
            stop = start + count
            if adapter is not None:
                mine = found.setdefault(adapter, [])
                if mine and mine[-1][1] == start:
                    mine[-1] = (mine[-1][0], stop)
                else:
                    mine.append((start, stop))
            start = stop
        scattered = self._send({adapter: mine for adapter, mine in found.items() if len(mine) > 1})
        self._groups = tuple(
            RowGroup(adapter, mine[0][0], mine[-1][1], scattered.get(adapter)) for adapter, mine in found.items()
        )

    def _send(self, spans: dict[str, list[tuple[int, int]]]) -> dict[str, torch.Tensor]:
        """The rows of the spans, on the device. Waits for nothing that runs there."""
        if not spans or self._staging is None:
            return {}
        rows = [np.concatenate([np.arange(*span, dtype=np.int32) for span in mine]) for mine in spans.values()]
        with self._staging.step(rows) as staged:
            return {adapter: one.device.long() for adapter, one in zip(spans, staged, strict=True)}


class _AdaptedLinear:
    """A linear layer and what each adapter adds to its rows."""

    def __init__(self, linear: Linear, updates: dict[str, LowRank], dtype: torch.dtype, step: Adapters) -> None:
        self._linear = linear
        self._updates = updates
        self._dtype = dtype
        self._step = step

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._linear(x).to(self._dtype)
        for group in self._step.groups:
            if (update := self._updates.get(group.adapter)) is None:
                continue
            if group.scattered is None:
                update.add_to(y[group.start : group.stop], x[group.start : group.stop])
            else:
                rows = y[group.scattered]
                update.add_to(rows, x[group.scattered])
                y[group.scattered] = rows
        return y
