"""Products with weights of 4 and 8 bits, whose activations are rounded to 8 bits, or to 16 as two times 8.

Weights lie above the least of their group of 32 inputs: w = scale * u + least, u in 0 .. 15 or 0 .. 255. Activations
are rounded so that u . q is a product of bytes, exact in integers:

    beside 4 bits    x = step * q                  a step for 16 inputs, so that a large one costs few others
    beside 8 bits    x = step * (q + r / 254)      a step for 32 inputs; twice the products, for lm_head's few rows

    y[n] = sum over groups of   scale[n] * (sum over its steps of  step * (u . q))  +  least[n] * sum(x)

Sixteen outputs make a block: one instruction of VNNI multiplies four inputs with all sixteen and adds the four products
up. A weight is one stretch of memory, read once from front to back:

    for each block of outputs, for each group of inputs
        u        4 bits: [4, 16 outputs, 4 inputs] uint8, the first 16 inputs in low bits, the others in high bits
                 8 bits: [8, 16 outputs, 4 inputs] uint8
        scale    [16] float16
        least    [16] float16

What comes before a product is done while activations are rounded: nothing, RMSNorm, or the SiLU gate. A result does not
depend on which rows are computed together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from engine.kernels.processor import Processor
from engine.kernels.simd import F16, F32, I8, I32, Function, Value, Variable
from engine.kernels.threads import Threads

GROUP = 32
BLOCK = 16
PLAIN, NORMED, GATED = range(3)
ARGUMENTS = (
    "x",  # float32 [rows, inputs]; GATED: [rows, 2 * inputs], the gate first
    "rows",
    "inputs",  # a multiple of GROUP
    "outputs",  # a multiple of BLOCK
    "before",  # PLAIN, NORMED or GATED
    "norm",  # NORMED: float32 [inputs]
    "eps",  # NORMED: float32
    "weight",
    "bias",  # float32 [outputs], or 0
    "y",  # float32 [rows, outputs]
    "add",  # 1: to what is in y
    "rounded",  # room for [rows, inputs] int8,
    "rests",  # beside 8 bits as much again: the r,
    "steps",  # [rows, inputs / STEP_INPUTS] float32,
    "sums",  # and [rows, inputs / GROUP]
    "share",  # blocks that a thread takes at a time
    "counter",  # 0
)
STEP_INPUTS = 16
_HALVES = (0, 16)
_REST = 254
_LEAST_STEP = 1e-30
_ROWS = 256
"""Computed for all blocks before the next are: their rounded activations stay in a processor's second cache."""


def group_bytes(bits: int) -> int:
    """Of one group of one block of outputs."""
    return BLOCK * GROUP * bits // 8 + 2 * BLOCK * 2


def write_product(module: ir.Module, name: str, bits: int, threads: Threads, processor: Processor) -> None:
    """Adds a function of ARGUMENTS to a module."""
    f = Function(module, name, ARGUMENTS)
    rounding = _FineRounding(f) if bits == 8 else _Rounding(f)
    rounding.write(threads)
    threads.meet(f)
    _Product(f, bits, processor).write()
    f.end()


class _Rounding:
    def __init__(self, f: Function) -> None:
        self.f = f
        self.groups = f.args["inputs"] // GROUP

    def write(self, threads: Threads) -> None:
        f, a = self.f, self.f.args
        with f.when(a["before"].equals(NORMED)):
            first, last = threads.share(f, a["rows"])
            with f.loop(first, last) as row:
                self._normed(row)
        first, last = threads.share(f, a["rows"] * self.groups)
        with f.when(a["before"].equals(PLAIN)), f.loop(first, last) as index:
            self._round(index, [f.load(a["x"], index * GROUP + half, F32, BLOCK) for half in _HALVES])
        with f.when(a["before"].equals(GATED)), f.loop(first, last) as index:
            self._gated(index)

    def _normed(self, row: Value) -> None:
        """x / sqrt(mean(x^2) + eps) * weight (RMSNorm, arXiv 1910.07467)."""
        f, a = self.f, self.f.args
        start = row * a["inputs"]
        squares = [f.variable(f.zeros(F32, BLOCK)) for _ in _HALVES]
        with f.loop(0, a["inputs"], GROUP) as index:
            for half, total in zip(_HALVES, squares, strict=True):
                x = f.load(a["x"], start + index + half, F32, BLOCK)
                total.set(f.fma(x, x, total.get()))
        mean = (squares[0].get() + squares[1].get()).sum() / a["inputs"].to(F32)
        factor = f.number(1.0) / f.square_root(mean + f.float_argument("eps"))
        with f.loop(0, self.groups) as group:
            values = []
            for half in _HALVES:
                index = group * GROUP + half
                x = f.load(a["x"], start + index, F32, BLOCK)
                values.append(x * factor * f.load(a["norm"], index, F32, BLOCK))
            self._round(row * self.groups + group, values)

    def _gated(self, index: Value) -> None:
        """silu(gate) * up, silu(x) = x / (1 + exp(-x))."""
        f, a = self.f, self.f.args
        start = index // self.groups * a["inputs"] * 2 + index % self.groups * GROUP
        values = []
        for half in _HALVES:
            gate = f.load(a["x"], start + half, F32, BLOCK)
            up = f.load(a["x"], start + a["inputs"] + half, F32, BLOCK)
            values.append(gate / (f.exp(gate * -1.0) + 1.0) * up)
        self._round(index, values)

    def _round(self, index: Value, halves: Sequence[Value]) -> None:
        """The group of this number among all. As integers, what is not a number is above all magnitudes: so it gets
        into a step."""
        f, a = self.f, self.f.args
        sums = []
        for number, (half, x) in enumerate(zip(_HALVES, halves, strict=True)):
            step = _step(f, f.absolute(x).as_type(I32).greatest().as_type(F32))
            q = _within_bytes(f, f.nearest(x / step))
            f.store(q.to(I32).to(I8), a["rounded"], index * GROUP + half)
            f.store(step, a["steps"], index * len(_HALVES) + number)
            sums.append(q * step)
        f.store((sums[0] + sums[1]).sum(), a["sums"], index)


class _FineRounding(_Rounding):
    """To 16 bits."""

    def _round(self, index: Value, halves: Sequence[Value]) -> None:
        f, a = self.f, self.f.args
        low, high = (f.absolute(x).as_type(I32) for x in halves)
        step = _step(f, f.maximum(low, high).greatest().as_type(F32))
        sums = []
        for half, x in zip(_HALVES, halves, strict=True):
            scaled = x / step
            q = _within_bytes(f, f.nearest(scaled))
            rest = _within_bytes(f, f.nearest((scaled - q) * _REST))
            f.store(q.to(I32).to(I8), a["rounded"], index * GROUP + half)
            f.store(rest.to(I32).to(I8), a["rests"], index * GROUP + half)
            sums.append(f.fma(rest, 1 / _REST, q))
        f.store(step, a["steps"], index)
        f.store((sums[0] + sums[1]).sum() * step, a["sums"], index)


def _step(f: Function, most: Value) -> Value:
    """127 of them are `most`."""
    return f.select(most < _LEAST_STEP, f.like(_LEAST_STEP, most), most) * (1 / 127)


def _within_bytes(f: Function, value: Value) -> Value:
    """Also what is not a number."""
    return f.minimum(f.maximum(value, -127.0), 127.0)


class _Product:
    def __init__(self, f: Function, bits: int, processor: Processor) -> None:
        self.f = f
        self.bits = bits
        self.processor = processor
        self.groups = f.args["inputs"] // GROUP

    def write(self) -> None:
        f, a = self.f, self.f.args
        blocks, share = a["outputs"] // BLOCK, a["share"]
        shares = (blocks + share - 1) // share
        chunks = (a["rows"] + (_ROWS - 1)) // _ROWS
        number = f.variable(f.take_argument("counter"))

        def work() -> None:
            chunk, first = number.get() // shares, number.get() % shares * share
            start = chunk * _ROWS
            rows = f.minimum(a["rows"] - start, _ROWS)
            with f.loop(first, f.minimum(first + share, blocks)) as block:
                self._block(block, start, start + rows)
            number.set(f.take_argument("counter"))

        f.repeat_while(lambda: number.get() < shares * chunks, work)

    def _block(self, block: Value, first: Value, last: Value) -> None:
        """Rows first .. last - 1."""
        f, tile = self.f, self.processor.tile_rows
        full = first + (last - first) // tile * tile
        with f.loop(first, full, tile) as row:
            self._tile(block, row, tile)
        for size in range(1, tile):
            with f.when((last - full).equals(size)):
                self._tile(block, full, size)

    def _tile(self, block: Value, row: Value, size: int) -> None:
        f, a = self.f, self.f.args
        weight = a["weight"] + block * self.groups * group_bytes(self.bits)
        totals = [f.variable(f.zeros(F32, BLOCK)) for _ in range(size)]
        with f.loop(0, self.groups) as group:
            place = weight + group * group_bytes(self.bits)
            quads = self._quads(place)
            halves = place + BLOCK * GROUP * self.bits // 8
            scale, least = (self.processor.floats(f, f.load(halves, start, F16, BLOCK)) for start in (0, BLOCK))
            for index, total in enumerate(totals):
                number = (row + index) * self.groups + group
                product = self._dot(quads, number)
                total.set(f.fma(least, f.load(a["sums"], number, F32), f.fma(product, scale, total.get())))
        for index, total in enumerate(totals):
            self._give(total.get(), (row + index) * a["outputs"] + block * BLOCK, block * BLOCK)

    def _quads(self, place: Value) -> list[Value]:
        """Four weights of each output in 32 bits, for each four inputs of a group."""
        loaded = [self.f.load(place, 64 * index, I8, 64).bits(I32, BLOCK) for index in range(self.bits)]
        if self.bits == 8:
            return loaded
        return [some & 0x0F0F0F0F for some in loaded] + [(some >> 4) & 0x0F0F0F0F for some in loaded]

    def _dot(self, quads: Sequence[Value], number: Value) -> Value:
        """Of a group of weights, as their u, with the group of activations of this number."""
        f, a = self.f, self.f.args
        if self.bits == 8:
            q, rest = (self._sum(quads, 0, a[name] + number * GROUP) for name in ("rounded", "rests"))
            return f.fma(rest, 1 / _REST, q) * f.load(a["steps"], number, F32)
        (first, step), (second, other_step) = (
            (
                self._sum(quads[4 * half : 4 * half + 4], 4 * half, a["rounded"] + number * GROUP),
                f.load(a["steps"], number * len(_HALVES) + half, F32),
            )
            for half in range(len(_HALVES))
        )
        return f.fma(second, other_step, first * step)

    def _sum(self, quads: Sequence[Value], first: int, inputs: Value) -> Value:
        """Of quads with the bytes of activations from 4 * first on."""
        f, total = self.f, self.f.zeros(I32, BLOCK)
        for index, quad in enumerate(quads):
            four = f.load(inputs, first + index, I32).splat(BLOCK)
            total = self.processor.dot4(f, total, quad, four, self.bits)
        return total.to(F32)

    def _give(self, total: Value, place: Value, output: Value) -> None:
        f, a = self.f, self.f.args
        result = f.variable(total)
        self._add_where(a["bias"], lambda: f.load(a["bias"], output, F32, BLOCK), result)
        self._add_where(a["add"], lambda: f.load(a["y"], place, F32, BLOCK), result)
        f.store(result.get(), a["y"], place)

    def _add_where(self, condition: Value, load: Callable[[], Value], result: Variable) -> None:
        with self.f.when(condition > 0):
            result.set(result.get() + load())
