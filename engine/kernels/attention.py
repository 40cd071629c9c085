"""Attention over paged keys and values, with sums in float32, whatever the pool stores.

A step first stores the keys and values of its tokens, then attends. A job is a few tokens of one sequence, one key head
and a stretch of keys; the query heads of the key head, for all its tokens, are the rows that read these keys together.
For few tokens the keys are cut into stretches, so that there are jobs for all threads, and the partial results are
merged afterwards (FlashDecoding): few.py. For many tokens a job goes through all the keys by itself, block by block
(FlashAttention, arXiv 2205.14135): many.py. What a row gets does not depend on who else is in the step, but by rounding
on whether few or many tokens of its sequence are computed with it.

Nothing behind the last key of a sequence gets into a result: it may be anything, also not a number.
"""

from __future__ import annotations

from llvmlite import ir

from engine.kernels.few import write_few, write_merge
from engine.kernels.geometry import JOB, MERGE, MOST_FEW, Geometry, Job, Merge
from engine.kernels.many import write_many
from engine.kernels.pool import Pool
from engine.kernels.processor import Processor
from engine.kernels.simd import I64, Function
from engine.kernels.threads import Threads

ARGUMENTS = (
    "q",  # float32 [tokens, heads, head_dim], tokens q_stride elements apart
    "q_stride",
    "k",  # float32 [tokens, kv_heads, head_dim]; v alike
    "k_stride",
    "v",
    "v_stride",
    "out",  # float32 [tokens, heads, head_dim]
    "pool",  # see pool.py
    "largest",
    "layer",
    "num_layers",
    "slots",  # int64 [tokens]: page * page_size + offset
    "tokens",
    "tables",  # int32, the page tables one after the other
    "jobs",  # int64 [num_jobs, JOB]
    "num_jobs",
    "merges",  # int64 [num_merges, MERGE]
    "num_merges",
    "partials",  # float32 [partial results, partial_size]
    "window",  # a token sees so many, itself included
    "scale",  # float32
    "softcap",  # float32
    "counter",  # 0
)


def write_attention(module: ir.Module, name: str, geometry: Geometry, threads: Threads, processor: Processor) -> None:
    """Adds a function of ARGUMENTS to a module."""
    f = Function(module, name, ARGUMENTS)
    pool, a, heads = Pool(f, geometry), f.args, geometry.num_kv_heads
    first, last = threads.share(f, a["tokens"] * heads)
    with f.loop(first, last) as index:
        pool.store(index // heads, index % heads)
    threads.meet(f)
    number = f.variable(f.take_argument("counter"))

    def work() -> None:
        index, head = number.get() // heads, number.get() % heads
        job = Job(head, *(f.load(a["jobs"], index * len(JOB) + field, I64) for field in range(len(JOB))))
        with f.when(job.count <= MOST_FEW):
            write_few(f, geometry, pool, job)
        with f.when(job.count > MOST_FEW):
            write_many(f, geometry, pool, job, processor)
        number.set(f.take_argument("counter"))

    f.repeat_while(lambda: number.get() < a["num_jobs"] * heads, work)
    with f.when(a["num_merges"] > 0):
        threads.meet(f)
        first, last = threads.share(f, a["num_merges"] * heads)
        with f.loop(first, last) as index:
            fields = (f.load(a["merges"], index // heads * len(MERGE) + field, I64) for field in range(len(MERGE)))
            write_merge(f, geometry, Merge(index % heads, *fields))
    f.end()
