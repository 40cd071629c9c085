"""Attention of few tokens: one stretch of keys at a time, read once, and what the stretches give merged."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kernels.geometry import NEVER, STRETCH, Geometry, Job, Merge, output, partial, scores
from engine.kernels.pool import KEYS, VALUES, Pool
from engine.kernels.simd import F32, Function, Value
from engine.kernels.turning import LaneSums


def write_few(f: Function, geometry: Geometry, pool: Pool, job: Job) -> None:
    """As many rows at a time as there are registers for their queries and sums."""
    rows, tile = job.count * geometry.group, max(1, min(4, 256 // geometry.head_dim))
    full = rows // tile * tile
    with f.loop(0, full, tile) as row:
        _Rows(f, geometry, pool, job, row, tile).write()
    for count in range(1, tile):
        with f.when((rows - full).equals(count)):
            _Rows(f, geometry, pool, job, full, count).write()


class _Rows:
    """`count` rows from `row` on against the stretch of a job."""

    def __init__(self, f: Function, geometry: Geometry, pool: Pool, job: Job, row: Value, count: int) -> None:
        self.f = f
        self.geometry = geometry
        self.pool = pool
        self.job = job
        self.rows = [row + index for index in range(count)]

    def write(self) -> None:
        f, job = self.f, self.job
        room = [f.scratch(F32, STRETCH + 16) for _ in self.rows]
        greatest = self._score(room)
        weights = self._weigh(room, greatest)
        for row, some, most, weight in zip(self.rows, self._add_up(room), greatest, weights, strict=True):
            with f.when(job.partial < 0):
                start = output(self.geometry, job.token, job.head, row)
                self._give(some, "out", start, f.number(1.0) / weight)
            with f.when(job.partial >= 0):
                start = partial(self.geometry, job.partial, job.head, row)
                self._give(some, "partials", start, f.number(1.0))
                f.store(most, f.args["partials"], start + self.geometry.head_dim)
                f.store(weight, f.args["partials"], start + self.geometry.head_dim + 1)

    def _score(self, room: Sequence[Value]) -> list[Value]:
        """The scores of all keys into each row's room; the greatest of each row."""
        f, g, job = self.f, self.geometry, self.job
        places = [job.query(f, g, row) for row in self.rows]
        queries = [[f.load(f.args["q"], place + part, F32, g.lanes) for part in g.starts] for place, _ in places]
        best = [f.variable(f.like(NEVER, f.zeros(F32, 16))) for _ in room]
        with f.loop(job.first, job.last, 16) as key:
            keys = self.pool.rows(job, key, KEYS)
            products = self._products(keys, queries)
            if self.pool.in_steps:
                steps = self.pool.steps(keys)
                products = [product * steps for product in products]
            for product, (_, position), most, own in zip(products, places, best, room, strict=True):
                score = scores(f, g, product, key, position, job.last)
                most.set(f.maximum(score, most.get()))
                f.store(score, own, key - job.first)
        return [most.get().greatest() for most in best]

    def _products(self, keys: Sequence[Value], queries: Sequence[Sequence[Value]]) -> list[Value]:
        """Of every query with the keys in 16 rows: 16 lanes each."""
        totals = [LaneSums() for _ in queries]
        for row in keys:
            key = self.pool.load(row)
            for query, total in zip(queries, totals, strict=True):
                product = query[0] * key[0]
                for one, other in zip(query[1:], key[1:], strict=True):
                    product = self.f.fma(one, other, product)
                total.add(product)
        return [total.get() for total in totals]

    def _weigh(self, room: Sequence[Value], greatest: Sequence[Value]) -> list[Value]:
        """Scores to weights, times the steps of the values; the sum of the weights of each row."""
        f, job = self.f, self.job
        totals = [f.variable(f.zeros(F32, 16)) for _ in room]
        with f.loop(job.first, job.last, 16) as key:
            steps = self.pool.steps(self.pool.rows(job, key, VALUES)) if self.pool.in_steps else None
            for own, most, total in zip(room, greatest, totals, strict=True):
                weight = f.exp(f.load(own, key - job.first, F32, 16) - most)
                total.set(total.get() + weight)
                f.store(weight if steps is None else weight * steps, own, key - job.first)
        return [total.get().sum() for total in totals]

    def _add_up(self, room: Sequence[Value]) -> list[list[Value]]:
        """The values of all keys, weighted."""
        f, g, job, pool = self.f, self.geometry, self.job, self.pool
        sums = [[f.variable(f.zeros(F32, g.lanes)) for _ in g.starts] for _ in room]
        with f.loop(job.first, job.last, 16) as key:
            first = pool.adjacent(job, key, VALUES)
            with f.loop(0, f.minimum(job.last - key, 16)) as offset:
                values = pool.load(pool.row(job, key + offset, VALUES) if first is None else first + offset)
                for own, totals in zip(room, sums, strict=True):
                    weight = f.load(own, key - job.first + offset, F32).splat(g.lanes)
                    for total, value in zip(totals, values, strict=True):
                        total.set(f.fma(weight, value, total.get()))
        return [[total.get() for total in totals] for totals in sums]

    def _give(self, sums: Sequence[Value], name: str, start: Value, factor: Value) -> None:
        for part, value in zip(self.geometry.starts, sums, strict=True):
            self.f.store(value * factor, self.f.args[name], start + part)


def write_merge(f: Function, geometry: Geometry, merge: Merge) -> None:
    """The whole results of all rows of a key head, from those of the stretches."""
    g, partials = geometry, f.args["partials"]
    with f.loop(0, merge.count * g.group) as row:
        best = f.variable(f.number(NEVER))
        with f.loop(0, merge.stretches) as stretch:
            start = partial(g, merge.partial + stretch, merge.head, row)
            best.set(f.maximum(f.load(partials, start + g.head_dim, F32), best.get()))
        sums, total = [f.variable(f.zeros(F32, g.lanes)) for _ in g.starts], f.variable(f.number(0.0))
        with f.loop(0, merge.stretches) as stretch:
            start = partial(g, merge.partial + stretch, merge.head, row)
            factor = f.exp(f.load(partials, start + g.head_dim, F32) - best.get())
            total.set(f.fma(f.load(partials, start + g.head_dim + 1, F32), factor, total.get()))
            for part, some in zip(g.starts, sums, strict=True):
                some.set(f.fma(f.load(partials, start + part, F32, g.lanes), factor, some.get()))
        share, start = f.number(1.0) / total.get(), output(g, merge.token, merge.head, row)
        for part, some in zip(g.starts, sums, strict=True):
            f.store(some.get() * share, f.args["out"], start + part)
