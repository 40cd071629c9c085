"""What happens to queries and keys before attention: a norm of each head in some models, and their positions."""

from __future__ import annotations

from llvmlite import ir

from engine.kernels.simd import F32, I64, Function, Value
from engine.kernels.threads import Threads

ARGUMENTS = (
    "x",  # float32, rows of `stride` elements: queries, keys, and what stays as it is
    "stride",
    "rows",
    "queries",  # heads
    "keys",  # heads
    "size",  # of a head, a multiple of `lanes`
    "positions",  # int64 [rows]
    "table",  # float32 [positions, size / 2, 2]: cosine and sine of each pair; 0: nothing is turned
    "query_norm",  # float32 [size], 0: none; key_norm alike
    "key_norm",
    "eps",  # float32
)


def write_rotary(module: ir.Module, name: str, lanes: int, threads: Threads) -> None:
    """Adds a function of ARGUMENTS to a module. lanes: 2, 4, 8 or 16."""
    f = Function(module, name, ARGUMENTS)
    a = f.args
    heads = a["queries"] + a["keys"]
    first, last = threads.share(f, a["rows"] * heads)
    with f.loop(first, last) as index:
        row, head = index // heads, index % heads
        start = row * a["stride"] + head * a["size"]
        norm = f.select(head < a["queries"], a["query_norm"], a["key_norm"])
        with f.when(norm > 0):
            _norm(f, start, norm, lanes)
        with f.when(a["table"] > 0):
            _turn(f, start, f.load(a["positions"], row, I64) * a["size"], lanes)
    f.end()


def _norm(f: Function, start: Value, norm: Value, lanes: int) -> None:
    """RMSNorm of one head (arXiv 1910.07467)."""
    a = f.args
    squares = f.variable(f.zeros(F32, lanes))
    with f.loop(0, a["size"], lanes) as part:
        x = f.load(a["x"], start + part, F32, lanes)
        squares.set(f.fma(x, x, squares.get()))
    mean = squares.get().sum() / a["size"].to(F32)
    factor = f.number(1.0) / f.square_root(mean + f.float_argument("eps"))
    with f.loop(0, a["size"], lanes) as part:
        x = f.load(a["x"], start + part, F32, lanes)
        f.store(x * factor * f.load(norm, part, F32, lanes), a["x"], start + part)


def _turn(f: Function, start: Value, angles: Value, lanes: int) -> None:
    """Each pair (a, b) of adjacent elements becomes (a cos - b sin, b cos + a sin)."""
    a, pairs = f.args, range(0, lanes, 2)
    with f.loop(0, a["size"], lanes) as part:
        x, table = f.load(a["x"], start + part, F32, lanes), f.load(a["table"], angles + part, F32, lanes)
        swapped = x.shuffle([lane for pair in pairs for lane in (pair + 1, pair)])
        cosines = table.shuffle([pair for pair in pairs for _ in (0, 1)])
        sines = table.shuffle([lane for pair in pairs for lane in (pair + 1 + lanes, pair + 1)], table * -1.0)
        f.store(f.fma(swapped, sines, x * cosines), a["x"], start + part)
