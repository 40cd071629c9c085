"""Many calls of kernels, prepared once and run in one go: between two of them the threads meet, and nothing else.

The arguments of all calls are rows of one table, so that what changes from step to step is written in few strokes:

    kind        rows of the table      arguments, by name
    product     0, 3, 5, 6, 7, ...     x, rows, inputs, ...
    rotary      1, 8, ...
    attention   2, 9, ...
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
from llvmlite import ir

from engine.kernels.simd import I64, Function
from engine.kernels.threads import Threads

ARGUMENTS = ("addresses", "table", "calls", "row_bytes")


def write_program(module: ir.Module, name: str, threads: Threads) -> None:
    """Adds a function of ARGUMENTS to a module. addresses: int64 [calls]; table: [calls], of so many bytes each."""
    f = Function(module, name, ARGUMENTS)
    a = f.args
    with f.loop(0, a["calls"]) as index:
        f.call_address(f.load(a["addresses"], index, I64), a["table"] + index * a["row_bytes"])
        threads.meet(f)
    f.end()


class Kernel(NamedTuple):
    """A function in memory: its address, and the names of its arguments in their order."""

    address: int
    names: Sequence[str]


class Program:
    """runner: the address of what `write_program` has written."""

    def __init__(self, threads: Threads, runner: int) -> None:
        self._threads = threads
        self._runner = runner
        self._calls: list[tuple[int, Sequence[int]]] = []
        self._parts: list[str] = []
        self._places: dict[Hashable, list[int]] = {}
        self._names: dict[Hashable, dict[str, int]] = {}
        self._rows: dict[Hashable, np.ndarray] = {}
        self._table = np.empty((0, 0), dtype=np.int64)
        self._addresses = np.empty(0, dtype=np.int64)

    def add(self, part: str, kind: Hashable, kernel: Kernel, arguments: Mapping[str, int]) -> None:
        """A call at the end. part: what it is a part of, for `run_watched`. kind: for `set`, of equal arguments.
        Arguments that are left out are 0."""
        self._places.setdefault(kind, []).append(len(self._calls))
        self._names[kind] = {name: index for index, name in enumerate(kernel.names)}
        self._calls.append((kernel.address, [arguments.get(name, 0) for name in kernel.names]))
        self._parts.append(part)

    def finish(self) -> None:
        """No more calls."""
        self._table = np.zeros((len(self._calls), max(len(values) for _, values in self._calls)), dtype=np.int64)
        for row, (_, values) in zip(self._table, self._calls, strict=True):
            row[: len(values)] = values
        self._addresses = np.array([address for address, _ in self._calls], dtype=np.int64)
        self._rows = {kind: np.array(places) for kind, places in self._places.items()}

    def set(self, kind: Hashable, **arguments: int) -> None:
        """Of all calls of a kind."""
        names, rows = self._names[kind], self._rows[kind]
        for name, value in arguments.items():
            self._table[rows, names[name]] = value

    def run(self) -> None:
        table = self._table
        arguments = (ctypes.c_int64 * len(ARGUMENTS))(
            self._addresses.ctypes.data, table.ctypes.data, len(table), table.strides[0]
        )
        self._threads.run(self._runner, ctypes.addressof(arguments))

    def run_watched(self, measure: Callable[[str], AbstractContextManager[None]]) -> None:
        """The same, call by call."""
        for part, address, row in zip(self._parts, self._addresses, self._table, strict=True):
            with measure(part):
                self._threads.run(int(address), row.ctypes.data)
