"""Attention of many tokens: blocks of keys, turned over once for all rows, with sums that follow the greatest score.

Where the pool is bfloat16 and the processor multiplies that, two products are added at once: then queries and weights
are rounded to bfloat16 as well, as FlashAttention does on GPUs. Scores and sums are float32 in any case.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.kernels.geometry import MANY, NEVER, Geometry, Job, output, scores
from engine.kernels.pool import KEYS, VALUES, Pool, to_bfloat16
from engine.kernels.processor import Processor
from engine.kernels.simd import F32, I16, I32, Function, Value, Variable
from engine.kernels.turning import transposed

_BLOCK = 32
"""Keys. Turned over, they and their values fill half of a processor's first cache."""
_HALVES = range(0, _BLOCK, 16)
_TILE = 4
"""Rows that are computed together."""
_PARTS = 4
"""Vectors of a value that are added up together, for each row of a tile."""


def write_many(f: Function, geometry: Geometry, pool: Pool, job: Job, processor: Processor) -> None:
    """All rows of a job against all its keys."""
    in_pairs = geometry.element == "bfloat16" and processor.has("avx512bf16") and geometry.head_dim % 32 == 0
    blocks = _PairedBlocks if in_pairs else _Blocks
    blocks(f, geometry, pool, job).write()


class _Blocks:
    """keys: [head_dim, _BLOCK]. values: [_BLOCK, head_dim]. For each row, in whole tiles: its sums [head_dim], the
    greatest score so far, and the sum of the weights. weights: of a tile, [_TILE, _BLOCK]."""

    def __init__(self, f: Function, geometry: Geometry, pool: Pool, job: Job) -> None:
        self.f = f
        self.geometry = geometry
        self.pool = pool
        self.job = job
        most = -(-MANY * geometry.group // _TILE) * _TILE
        self.rows = job.count * geometry.group
        self.keys, self.values = (f.scratch(F32, geometry.head_dim * _BLOCK) for _ in range(2))
        self.sums = f.scratch(F32, most * geometry.head_dim)
        self.greatest, self.totals = (f.scratch(F32, most) for _ in range(2))
        self.weights = f.scratch(F32, _TILE * _BLOCK)

    def write(self) -> None:
        f, g, job = self.f, self.geometry, self.job
        self._begin()
        with f.loop(0, self.rows, _TILE) as row:
            f.store(f.like(NEVER, f.zeros(F32, _TILE)), self.greatest, row)
            f.store(f.zeros(F32, _TILE), self.totals, row)
            with f.loop(0, _TILE * g.head_dim, g.lanes) as start:
                f.store(f.zeros(F32, g.lanes), self.sums, row * g.head_dim + start)
        with f.loop(job.first, job.last, _BLOCK) as key:
            self._turn_keys(key)
            self._copy_values(key)
            with f.loop(0, self.rows, _TILE) as row:
                last_token = f.minimum(row + (_TILE - 1), self.rows - 1) // g.group
                with f.when(key <= job.position + last_token):
                    self._add(row, self._weigh(row, key))
        with f.loop(0, self.rows) as row:
            share = f.number(1.0) / f.load(self.totals, row, F32)
            place = output(g, job.token, job.head, row)
            for part in g.starts:
                value = f.load(self.sums, row * g.head_dim + part, F32, g.lanes)
                f.store(value * share, f.args["out"], place + part)

    def _begin(self) -> None:
        """Before the first block."""

    def _turn_keys(self, key: Value) -> None:
        f, g, job = self.f, self.geometry, self.job
        with f.loop(0, _BLOCK, 16) as half:
            with f.when(key + half < job.last):
                rows = self.pool.rows(job, key + half, KEYS)
                steps = self.pool.steps(rows) if self.pool.in_steps else None
                loaded = [self.pool.load(row) for row in rows]
                for part, start in enumerate(g.starts):
                    for lane, value in enumerate(transposed([vectors[part] for vectors in loaded])):
                        turned = value if steps is None else value * steps
                        f.store(turned, self.keys, half + (start + lane) * _BLOCK)

    def _copy_values(self, key: Value) -> None:
        """Zeros behind the last: whatever is there must not get into a sum, not even with a weight of zero."""
        f, g, job = self.f, self.geometry, self.job
        with f.loop(0, _BLOCK) as index:
            with f.when(key + index < job.last):
                row = self.pool.row(job, key + index, VALUES)
                step = self.pool.step(row) if self.pool.in_steps else None
                for part, value in zip(g.starts, self.pool.load(row), strict=True):
                    f.store(value if step is None else value * step, self.values, index * g.head_dim + part)
            with f.when(key + index >= job.last):
                for part in g.starts:
                    f.store(f.zeros(F32, g.lanes), self.values, index * g.head_dim + part)

    def _weigh(self, first: Value, key: Value) -> list[Value]:
        """The weights of a tile's rows; gives what each row's sums so far are to be multiplied by. Behind the last row
        of the job, that row is computed once more."""
        f, g, job = self.f, self.geometry, self.job
        rows = [f.minimum(first + index, self.rows - 1) for index in range(_TILE)]
        factors = []
        for index, products in enumerate(self._products(rows)):
            position, row = job.query(f, g, rows[index])[1], first + index
            found = [
                scores(f, g, product, key + half, position, job.last)
                for half, product in zip(_HALVES, products, strict=True)
            ]
            before = f.load(self.greatest, row, F32)
            greatest = f.maximum(f.maximum(found[0], found[1]).greatest(), before)
            factor, weights = f.exp(before - greatest), [f.exp(score - greatest) for score in found]
            total = f.fma(f.load(self.totals, row, F32), factor, (weights[0] + weights[1]).sum())
            f.store(greatest, self.greatest, row)
            f.store(total, self.totals, row)
            for half, weight in zip(_HALVES, weights, strict=True):
                self._store_weights(weight, index * _BLOCK + half)
            factors.append(factor)
        return factors

    def _store_weights(self, weights: Value, start: int) -> None:
        self.f.store(weights, self.weights, self.f.integer(start))

    def _products(self, rows: Sequence[Value]) -> list[list[Value]]:
        """Of the queries of these rows with each half of the block."""
        f = self.f
        places = [self.job.query(f, self.geometry, row)[0] for row in rows]
        products = [[f.variable(f.zeros(F32, 16)) for _ in _HALVES] for _ in places]
        with f.loop(0, self.geometry.head_dim) as index:
            keys = [f.load(self.keys, index * _BLOCK + half, F32, 16) for half in _HALVES]
            for place, some in zip(places, products, strict=True):
                query = f.load(f.args["q"], place + index, F32).splat(16)
                for product, key in zip(some, keys, strict=True):
                    product.set(f.fma(query, key, product.get()))
        return [[product.get() for product in some] for some in products]

    def _add(self, first: Value, factors: Sequence[Value]) -> None:
        """The weighted values of the block to the sums of a tile's rows."""
        f, g = self.f, self.geometry
        for start in range(0, len(g.starts), _PARTS):
            parts = g.starts[start : start + _PARTS]
            places = [(first + index) * g.head_dim for index in range(_TILE)]
            sums = [
                [f.variable(f.load(self.sums, place + part, F32, g.lanes) * factor) for part in parts]
                for place, factor in zip(places, factors, strict=True)
            ]
            self._add_products(parts, sums)
            for place, totals in zip(places, sums, strict=True):
                for part, total in zip(parts, totals, strict=True):
                    f.store(total.get(), self.sums, place + part)

    def _add_products(self, parts: Sequence[int], sums: Sequence[Sequence[Variable]]) -> None:
        """The weights of the tile with the values of the block, from the elements `parts` on, to each row's sums."""
        f, g = self.f, self.geometry
        with f.loop(0, _BLOCK) as offset:
            values = [f.load(self.values, offset * g.head_dim + part, F32, g.lanes) for part in parts]
            for index, totals in enumerate(sums):
                weight = f.load(self.weights, offset + index * _BLOCK, F32).splat(g.lanes)
                for total, value in zip(totals, values, strict=True):
                    total.set(f.fma(weight, value, total.get()))


class _PairedBlocks(_Blocks):
    """With bfloat16 in pairs, one behind the other in 32 bits: keys [head_dim / 2, _BLOCK] and queries [rows, head_dim
    / 2] along the head, values [_BLOCK / 2, head_dim] and weights [_TILE, _BLOCK / 2] along the block."""

    def _begin(self) -> None:
        f, g = self.f, self.geometry
        self.queries = f.scratch(I16, -(-MANY * g.group // _TILE) * _TILE * g.head_dim)
        with f.loop(0, self.rows) as row:
            place, _ = self.job.query(f, g, row)
            for part in g.starts:
                query = to_bfloat16(f, f.load(f.args["q"], place + part, F32, g.lanes))
                f.store(query, self.queries, row * g.head_dim + part)

    def _turn_keys(self, key: Value) -> None:
        f, g, job = self.f, self.geometry, self.job
        with f.loop(0, _BLOCK, 16) as half:
            with f.when(key + half < job.last):
                rows = self.pool.rows(job, key + half, KEYS)
                for start in range(0, g.head_dim // 2, 16):
                    pairs = [f.load(f.args["pool"], row * (g.head_dim // 2) + start, I32, 16) for row in rows]
                    for lane, value in enumerate(transposed(pairs)):
                        f.store(value, self.keys, half + (start + lane) * _BLOCK)

    def _copy_values(self, key: Value) -> None:
        f, g, job = self.f, self.geometry, self.job
        with f.loop(0, _BLOCK, 2) as index:
            start = index // 2 * g.head_dim
            pair = [f.minimum(key + index + one, job.last - 1) for one in (0, 1)]
            rows = [self.pool.row(job, one, VALUES) for one in pair]
            there = [key + index + one < job.last for one in (0, 1)]
            for part in g.starts:
                first, second = (
                    f.select(seen.splat(16), f.load(f.args["pool"], row * g.head_dim + part, I16, 16), f.zeros(I16, 16))
                    for row, seen in zip(rows, there, strict=True)
                )
                both = first.to(I32, signed=False) | (second.to(I32, signed=False) << 16)
                f.store(both, self.values, start + part)

    def _store_weights(self, weights: Value, start: int) -> None:
        self.f.store(to_bfloat16(self.f, weights), self.weights, self.f.integer(start))

    def _products(self, rows: Sequence[Value]) -> list[list[Value]]:
        f, pairs = self.f, self.geometry.head_dim // 2
        products = [[f.variable(f.zeros(F32, 16)) for _ in _HALVES] for _ in rows]
        with f.loop(0, pairs) as index:
            keys = [f.load(self.keys, index * _BLOCK + half, I32, 16) for half in _HALVES]
            for row, some in zip(rows, products, strict=True):
                query = f.load(self.queries, row * pairs + index, I32).splat(16)
                for product, key in zip(some, keys, strict=True):
                    product.set(f.add_pairs(product.get(), query, key))
        return [[product.get() for product in some] for some in products]

    def _add_products(self, parts: Sequence[int], sums: Sequence[Sequence[Variable]]) -> None:
        f, g = self.f, self.geometry
        with f.loop(0, _BLOCK // 2) as pair:
            values = [f.load(self.values, pair * g.head_dim + part, I32, 16) for part in parts]
            for index, totals in enumerate(sums):
                weight = f.load(self.weights, pair + index * (_BLOCK // 2), I32).splat(16)
                for total, value in zip(totals, values, strict=True):
                    total.set(f.add_pairs(total.get(), weight, value))
