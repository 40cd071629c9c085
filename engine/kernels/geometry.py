"""What attention is written for, and the work of a step in numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from engine.kernels.simd import Function, Value

STRETCH = 256
"""Keys that a job of few tokens attends to."""
MOST_FEW = 8
"""Tokens of such a job; one with more goes through all the keys."""
MANY = 32
"""The most tokens of a job."""
NEVER = -1e30
"""The score of a key that is not seen: less than any other."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """element: float32, bfloat16 or int8. capped: scores have a soft cap."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    element: str
    capped: bool

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def lanes(self) -> int:
        """Of the vectors that a head is cut into: 16, or less where 16 does not divide it."""
        return next(lanes for lanes in (16, 8, 4, 2, 1) if self.head_dim % lanes == 0)

    @property
    def starts(self) -> range:
        """Where these vectors begin."""
        return range(0, self.head_dim, self.lanes)

    @property
    def partial_size(self) -> int:
        """float32 of a partial result: for each key head and row the weighted sum of values, the greatest score and
        the sum of the weights."""
        return self.num_kv_heads * MOST_FEW * self.group * (self.head_dim + 2)


@dataclass(frozen=True, slots=True)
class Job:
    """`count` of the flat tokens from `token` on, the first at `position`, whose page table begins at `table` among all
    tables, attend to the keys first .. last - 1; first is a multiple of 16. partial: the number of the partial result,
    -1: it is the whole one.
    """

    head: Value
    token: Value
    count: Value
    position: Value
    table: Value
    first: Value
    last: Value
    partial: Value

    def query(self, f: Function, geometry: Geometry, row: Value) -> tuple[Value, Value]:
        """Where the query of a row begins, and its position."""
        token, head = row // geometry.group, self.head * geometry.group + row % geometry.group
        return (self.token + token) * f.args["q_stride"] + head * geometry.head_dim, self.position + token


@dataclass(frozen=True, slots=True)
class Merge:
    """The results of `count` tokens from `token` on are in so many stretches, the first with the number `partial`."""

    head: Value
    token: Value
    count: Value
    partial: Value
    stretches: Value


JOB, MERGE = (tuple(field.name for field in fields(kind) if field.name != "head") for kind in (Job, Merge))


def output(geometry: Geometry, token: Value, head: Value, row: Value) -> Value:
    """Where the result of a row of a key head begins; token: the first of its job."""
    query_head = head * geometry.group + row % geometry.group
    return ((token + row // geometry.group) * geometry.num_heads + query_head) * geometry.head_dim


def partial(geometry: Geometry, number: Value, head: Value, row: Value) -> Value:
    """Where the partial result of a row begins."""
    rows = head * (MOST_FEW * geometry.group) + row
    return number * geometry.partial_size + rows * (geometry.head_dim + 2)


def scores(f: Function, geometry: Geometry, products: Value, key: Value, position: Value, last: Value) -> Value:
    """Of the keys from `key` on, below `last`; NEVER for those that a token at `position` does not see."""
    lanes = products.lanes
    scaled = products * f.float_argument("scale")
    if geometry.capped:
        cap = f.float_argument("softcap")
        above = f.exp(scaled * (f.number(2.0) / cap)) + 1.0
        scaled = (f.like(1.0, above) - f.like(2.0, above) / above) * cap  # tanh
    keys = f.iota(lanes) + key
    seen = keys < f.minimum(position + 1, last)
    seen = seen & (keys > position - f.args["window"])
    return f.select(seen, scaled, f.like(NEVER, scaled))
