"""Keys and values in pages.

    pool     [pages, layers, 2, kv_heads, page_size, head_dim]    float32, bfloat16 or int8; 2: keys, values
    largest  [pages, layers, 2, kv_heads, page_size]              bfloat16, beside int8

int8 has 127 steps to either side of zero: element = q * step, step = largest / 127, where `largest` is the magnitude of
the largest element of a token and head. It is rounded to bfloat16 before anything is divided by it.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.kernels.geometry import Geometry, Job
from engine.kernels.simd import F32, I8, I16, I32, I64, Function, Value
from engine.kernels.turning import gathered

KEYS, VALUES = range(2)
_SMALLEST_STEP = 1.1754943508222875e-38


class Pool:
    """Rows of head_dim elements, by their numbers. A row is read and written in vectors of `geometry.lanes`."""

    def __init__(self, f: Function, geometry: Geometry) -> None:
        self._f = f
        self._geometry = geometry
        self._element = {"float32": F32, "bfloat16": I16, "int8": I8}[geometry.element]
        self._aligned = geometry.page_size % 16 == 0

    @property
    def in_steps(self) -> bool:
        """What is loaded counts steps."""
        return self._geometry.element == "int8"

    def store(self, token: Value, head: Value) -> None:
        """The key and the value of one of the step's tokens."""
        f, a, g = self._f, self._f.args, self._geometry
        slot = f.load(a["slots"], token, I64)
        for which, source in ((KEYS, "k"), (VALUES, "v")):
            start = token * a[f"{source}_stride"] + head * g.head_dim
            values = [f.load(a[source], start + part, F32, g.lanes) for part in g.starts]
            row = self._row(slot // g.page_size, slot % g.page_size, head, which)
            if g.element == "int8":
                values = self._rounded(values, row)
            elif g.element == "bfloat16":
                values = [to_bfloat16(f, value) for value in values]
            for part, value in zip(g.starts, values, strict=True):
                f.store(value, a["pool"], row * g.head_dim + part)

    def rows(self, job: Job, key: Value, which: int) -> list[Value]:
        """Of 16 keys from `key` on, a multiple of 16; for those behind the last one, some row of the sequence."""
        if self._aligned:
            first = self.row(job, key, which)
            return [first + index for index in range(16)]
        return [self.row(job, self._f.minimum(key + index, job.last - 1), which) for index in range(16)]

    def row(self, job: Job, key: Value, which: int) -> Value:
        f, g = self._f, self._geometry
        page = f.load(f.args["tables"], job.table + key // g.page_size, I32).to(I64)
        return self._row(page, key % g.page_size, job.head, which)

    def adjacent(self, job: Job, key: Value, which: int) -> Value | None:
        """The row of a key that is a multiple of 16, if those of the 15 behind it follow; None: they may not."""
        return self.row(job, key, which) if self._aligned else None

    def load(self, row: Value) -> list[Value]:
        """A row as float32, or as the numbers of its steps."""
        f, g = self._f, self._geometry
        loaded = [f.load(f.args["pool"], row * g.head_dim + part, self._element, g.lanes) for part in g.starts]
        if g.element == "bfloat16":
            return [from_bfloat16(value) for value in loaded]
        return loaded if g.element == "float32" else [value.to(I32).to(F32) for value in loaded]

    def step(self, row: Value) -> Value:
        """How wide a step of a row is."""
        return self._step(self._f.load(self._f.args["largest"], row, I16))

    def steps(self, rows: Sequence[Value]) -> Value:
        """The same of 16 rows, as `rows` gives them."""
        if self._aligned:
            return self._step(self._f.load(self._f.args["largest"], rows[0], I16, 16))
        return gathered([self.step(row) for row in rows])

    def _row(self, page: Value, offset: Value, head: Value, which: int) -> Value:
        g, a = self._geometry, self._f.args
        above = (page * a["num_layers"] + a["layer"]) * 2 + which
        return (above * g.num_kv_heads + head) * g.page_size + offset

    def _rounded(self, values: Sequence[Value], row: Value) -> list[Value]:
        """In steps, and stores `largest`. What is not a number makes the step no number."""
        f = self._f
        most = f.absolute(values[0]).as_type(I32)  # as integers, what is not a number is above all magnitudes
        for value in values[1:]:
            most = f.maximum(f.absolute(value).as_type(I32), most)
        largest = to_bfloat16(f, most.greatest().as_type(F32))
        f.store(largest, f.args["largest"], row)
        step = self._step(largest)
        quotients = (f.maximum(f.nearest(value / step), -127.0) for value in values)
        return [f.minimum(quotient, 127.0).to(I32).to(I8) for quotient in quotients]

    def _step(self, largest: Value) -> Value:
        step = from_bfloat16(largest) * (1 / 127)
        return self._f.select(step < _SMALLEST_STEP, self._f.like(_SMALLEST_STEP, step), step)


def to_bfloat16(f: Function, value: Value) -> Value:
    """The nearest, halves to the even one, as its bits; what is not a number stays so."""
    bits = value.as_type(I32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return f.select(value.is_number(), rounded, f.like(0x7FC0, rounded)).to(I16)


def from_bfloat16(bits: Value) -> Value:
    return (bits.to(I32, signed=False) << 16).as_type(F32)
