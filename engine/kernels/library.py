"""The machine code of this process, as functions over tensors.

Code is compiled at the first call that needs it, or read from where an earlier process has left it; it is the same for
all who use it. Addresses are all that it gets: so every tensor is checked before, here or in engine/attention/cpu.py.
`call` gives what a kernel takes, by name, for those who put it into a program.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from llvmlite import ir

from engine.folders import xdg_folder
from engine.kernels import attention, products, program, rotary
from engine.kernels.geometry import Geometry
from engine.kernels.jit import Compiled, compiled
from engine.kernels.processor import Processor
from engine.kernels.program import Kernel, Program
from engine.kernels.threads import Threads

_SHARES = 8
"""Of the outputs of a product, for each thread: one that is held up leaves the rest to the others."""


class Norm(NamedTuple):
    """RMSNorm: weight float32 [size]."""

    weight: torch.Tensor
    eps: float


class Products:
    """Products with packed weights. Holds room for rounded activations: one thread at a time."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        add_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x @ w.T + bias, float32 [rows, outputs]; with add_to, which is of that shape, added to it and given back.

        x: float32 [rows, inputs], or gated [rows, 2 * inputs]: then silu(first half) * second half is what counts.
        weight: uint8 [outputs / 16, inputs / 32, bytes], see engine/kernels/products.py. bias: float32 [outputs].
        norm: applied to x first. Raises ValueError where these do not fit.
        """
        y = torch.empty(len(x), len(weight) * products.BLOCK) if add_to is None else add_to
        if len(x):
            kernel, arguments = self.call(x, weight, bias, y, norm=norm, gated=gated, add=add_to is not None)
            run_kernel(kernel, arguments)
        return y

    def call(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        y: torch.Tensor,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        add: bool = False,
    ) -> tuple[Kernel, dict[str, int]]:
        """What computes y, or adds to it. The tensors must outlive the call, and no product of more rows may be
        computed in between."""
        blocks, groups, size = weight.shape
        bits = 4 if size == products.group_bytes(4) else 8
        outputs, inputs, rows = blocks * products.BLOCK, groups * products.GROUP, len(x)
        _check(x, torch.float32, (rows, inputs * (2 if gated else 1)))
        _check(weight, torch.uint8, (blocks, groups, products.group_bytes(bits)))
        _check(y, torch.float32, (rows, outputs))
        before, norm_weight, eps = products.GATED if gated else products.PLAIN, 0, 0.0
        if norm is not None and gated:
            raise ValueError("a product is normed or gated, not both")
        if norm is not None:
            _check(norm.weight, torch.float32, (inputs,))
            before, norm_weight, eps = products.NORMED, norm.weight.data_ptr(), norm.eps
        if bias is not None:
            _check(bias, torch.float32, (outputs,))
        return _basic(f"product{bits}", products.ARGUMENTS), {
            "x": x.data_ptr(),
            "rows": rows,
            "inputs": inputs,
            "outputs": outputs,
            "before": before,
            "norm": norm_weight,
            "eps": float_bits(eps),
            "weight": weight.data_ptr(),
            "bias": 0 if bias is None else bias.data_ptr(),
            "y": y.data_ptr(),
            "add": int(add),
            **self._rooms(rows, inputs),
            "share": max(1, blocks // (_SHARES * torch.get_num_threads())),
        }

    def reserve(self, rows: int, inputs: int) -> None:
        """Room for so many activations, from now on."""
        self._rooms(rows, inputs)

    def _rooms(self, rows: int, inputs: int) -> dict[str, int]:
        """Addresses of room for rounded activations."""
        bytes_of = {
            "rounded": rows * inputs,
            "rests": rows * inputs,
            "steps": rows * inputs // products.STEP_INPUTS * 4,
            "sums": rows * inputs // products.GROUP * 4,
        }
        if len(self._room) < sum(bytes_of.values()):
            self._room = torch.empty(sum(bytes_of.values()), dtype=torch.uint8)
        ends = accumulate(bytes_of.values(), initial=self._room.data_ptr())
        return dict(zip(bytes_of, ends, strict=False))


class Heads(NamedTuple):
    """What happens to queries and keys: `queries` and `keys` heads, each normed where there is a norm, and turned by
    the angles of its position where there is a table: float32 [positions, size / 2, 2], cosine and sine of each pair.
    """

    queries: int
    keys: int
    table: torch.Tensor | None
    query_norm: Norm | None = None
    key_norm: Norm | None = None

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> None:
        """In place. x: float32 [rows, all heads, size]: queries, keys, and what stays as it is. positions: int64
        [rows], each below the length of the table. Raises ValueError where these do not fit."""
        kernel, arguments = self.call(x)
        _check(positions, torch.int64, (len(x),))
        if (
            self.table is not None
            and len(x)
            and not 0 <= int(positions.min()) <= int(positions.max()) < len(self.table)
        ):
            raise ValueError(f"a position beyond the {len(self.table)} of the table")
        run_kernel(kernel, arguments | {"positions": positions.data_ptr()})

    def call(self, x: torch.Tensor) -> tuple[Kernel, dict[str, int]]:
        """What turns x, but for `positions`. The tensors must outlive the call."""
        rows, all_heads, size = x.shape
        _check(x, torch.float32, (rows, all_heads, size))
        if self.queries + self.keys > all_heads or size % 2:
            raise ValueError(f"{self.queries} and {self.keys} of {all_heads} heads of {size} elements")
        if self.table is not None:
            _check(self.table, torch.float32, (len(self.table), size // 2, 2))
        eps = 0.0
        norms = [norm for norm in (self.query_norm, self.key_norm) if norm is not None]
        if len({norm.eps for norm in norms}) > 1:
            raise ValueError("queries and keys are normed with different eps")
        for norm in norms:
            _check(norm.weight, torch.float32, (size,))
            eps = norm.eps
        lanes = next(lanes for lanes in (16, 8, 4, 2) if size % lanes == 0)
        return _basic(f"rotary{lanes}", rotary.ARGUMENTS), {
            "x": x.data_ptr(),
            "stride": all_heads * size,
            "rows": rows,
            "queries": self.queries,
            "keys": self.keys,
            "size": size,
            "table": 0 if self.table is None else self.table.data_ptr(),
            "query_norm": 0 if self.query_norm is None else self.query_norm.weight.data_ptr(),
            "key_norm": 0 if self.key_norm is None else self.key_norm.weight.data_ptr(),
            "eps": float_bits(eps),
        }


def attention_kernel(geometry: Geometry) -> Kernel:
    """What attends; see engine/kernels/attention.py for what it takes."""
    return Kernel(_attention(geometry).address("attention"), attention.ARGUMENTS)


def run_kernel(kernel: Kernel, arguments: Mapping[str, int]) -> None:
    """On all threads. Arguments that are left out are 0."""
    values = (ctypes.c_int64 * len(kernel.names))(*(arguments.get(name, 0) for name in kernel.names))
    threads().run(kernel.address, ctypes.addressof(values))


def new_program() -> Program:
    return Program(threads(), _basics().address("program"))


def float_bits(value: float) -> int:
    """The float32 as a kernel takes it."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


@cache
def threads() -> Threads:
    return Threads()


def _basic(name: str, names: Sequence[str]) -> Kernel:
    return Kernel(_basics().address(name), names)


@cache
def _basics() -> Compiled:
    processor = Processor.host()

    def write(module: ir.Module) -> None:
        program.write_program(module, "program", threads())
        for bits in (4, 8):
            products.write_product(module, f"product{bits}", bits, threads(), processor)
        for lanes in (2, 4, 8, 16):
            rotary.write_rotary(module, f"rotary{lanes}", lanes, threads())

    return compiled(f"basics {threads().shared}", write, processor, _folder())


@cache
def _attention(geometry: Geometry) -> Compiled:
    processor = Processor.host()

    def write(module: ir.Module) -> None:
        attention.write_attention(module, "attention", geometry, threads(), processor)

    return compiled(f"{geometry} {threads().shared}", write, processor, _folder())


def _folder() -> Path:
    return xdg_folder("XDG_CACHE_HOME", ".cache") / "chatd" / "kernels"


def _check(tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device.type != "cpu":
        found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        raise ValueError(f"{found} where a contiguous {dtype} {list(shape)} on the CPU is needed")
