"""Paged attention for CPUs: keys and values are read where they lie (engine/kernels/attention.py).

    pool     [pages, layers, 2, kv_heads, page_size, head_dim]    2: keys, values
    largest  [pages, layers, 2, kv_heads, page_size]              beside int8

A page is one stretch of memory. Scores and sums are float32, whatever the pool stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cache import TailCopy
from engine.attention.base import AttentionRow, KVShape, LayerAttention, layers_of, scale_of
from engine.attention.step_tables import StepTables
from engine.kernels import Geometry, Kernel, attention_kernel, float_bits, run_kernel
from engine.kernels.geometry import MANY, MOST_FEW, STRETCH

Int64s = npt.NDArray[np.int64]
_NO_WINDOW = 1 << 40
_KEYS_IN_STEP = 16
"""Keys that a kernel loads together; where it begins is a multiple of them."""


@dataclass(frozen=True, slots=True)
class _Work:
    """See engine/kernels/attention.py. partials: how many results are partial ones."""

    jobs: Int64s
    merges: Int64s
    partials: int


@dataclass(frozen=True, slots=True)
class _Step:
    """A planned step. slots: where each token's keys and values go. work: by the windows of layers."""

    tokens: int
    slots: Int64s
    tables: npt.NDArray[np.int32]
    work: dict[int | None, _Work]


class CpuAttention:
    """The AttentionBackend for CPUs. Holds the pool: num_pages * page_bytes bytes, touched as it fills.

    layers: one for each layer of the shape; None: all of them plain.
    """

    def __init__(self, shape: KVShape, layers: Sequence[LayerAttention] | None = None) -> None:
        self._shape = shape
        self._layers = layers_of(shape, layers)
        self._windows = tuple(dict.fromkeys(layer.window for layer in self._layers))
        rows = (shape.num_pages, shape.num_layers, 2, shape.num_kv_heads, shape.page_size)
        self._pool = torch.empty((*rows, shape.head_dim), dtype=shape.dtype)
        self._largest = torch.empty(rows if shape.dtype == torch.int8 else (0,), dtype=torch.bfloat16)
        self._partials = torch.empty(0)
        self._partial_size = 0  # of the widest layer that was called for
        self._kernels: dict[tuple[int, bool], Kernel] = {}
        self._step: _Step | None = None

    def plan(self, rows: Sequence[AttentionRow]) -> None:
        size = self._shape.page_size
        for row in rows:
            if row.count < 1 or row.start < 0 or len(row.pages) * size < row.start + row.count:
                raise ValueError(f"{len(row.pages)} pages cannot take {row.count} tokens from {row.start} on")
        tables = StepTables.build(rows, size)
        if tables.pages.min() < 0 or tables.pages.max() >= self._shape.num_pages:
            raise ValueError(f"a page beyond the {self._shape.num_pages} of the pool")
        slots = tables.token_slots(size).astype(np.int64)
        work = {window: _work(rows, tables, window) for window in self._windows}
        self._step = _Step(len(slots), slots, tables.pages, work)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = _in_rows(q), _in_rows(k), _in_rows(v)
        out = torch.empty(len(q), q.shape[1], self._shape.head_dim)
        kernel, arguments = self.call(layer, q, k, v, out)
        planned = self.planned(self.window(layer))
        if not planned["tokens"] == len(q) == len(k) == len(v):
            raise ValueError(f"{len(q)} tokens, and {planned['tokens']} were planned")
        run_kernel(kernel, arguments | planned)
        return out

    def window(self, layer: int) -> int | None:
        """Layers of one window have what is `planned` in common."""
        return self._layers[layer].window

    def call(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> tuple[Kernel, dict[str, int]]:
        """What attends in a layer of any step, but for what is `planned`. q, k, v: as in `run`, float32, of any number
        of tokens, which need not be adjacent. out: float32 [T, Hq, D]. All of them must outlive the call."""
        shape, options, heads = self._shape, self._layers[layer], q.shape[1]
        fits = q.shape[2] == shape.head_dim and heads % shape.num_kv_heads == 0
        if not (fits and k.shape[1:] == v.shape[1:] == (shape.num_kv_heads, shape.head_dim)):
            raise ValueError(f"queries, keys and values of {q.shape[1:]}, {k.shape[1:]}, {v.shape[1:]}")
        if out.shape != q.shape or not out.is_contiguous() or not all(map(_is_in_rows, (q, k, v, out))):
            raise ValueError("queries, keys, values and what they give are float32 on the CPU, heads side by side")
        return self._kernel(heads, options.softcap is not None), {
            "q": q.data_ptr(),
            "q_stride": q.stride(0),
            "k": k.data_ptr(),
            "k_stride": k.stride(0),
            "v": v.data_ptr(),
            "v_stride": v.stride(0),
            "out": out.data_ptr(),
            "pool": self._pool.data_ptr(),
            "largest": self._largest.data_ptr(),
            "layer": layer,
            "num_layers": shape.num_layers,
            "window": options.window or _NO_WINDOW,
            "scale": float_bits(scale_of(options, shape.head_dim)),
            "softcap": float_bits(options.softcap or 0.0),
        }

    def planned(self, window: int | None) -> dict[str, int]:
        """The arguments of `call` that belong to the planned step."""
        if (step := self._step) is None:
            raise RuntimeError("attention was not planned")
        work = step.work[window]
        room = self._partial_size * max(each.partials for each in step.work.values())
        if len(self._partials) < room:  # at once for all windows: their arguments hold its address
            self._partials = torch.empty(room)
        return {
            "slots": step.slots.ctypes.data,
            "tokens": step.tokens,
            "tables": step.tables.ctypes.data,
            "jobs": work.jobs.ctypes.data,
            "num_jobs": len(work.jobs),
            "merges": work.merges.ctypes.data,
            "num_merges": len(work.merges),
            "partials": self._partials.data_ptr(),
            "counter": 0,
        }

    def fork(self, source: int, target: int, tokens: int, tail: TailCopy | None) -> None:
        if tail is not None:
            self._pool[tail.dst, :, :, :, : tail.n_tokens] = self._pool[tail.src, :, :, :, : tail.n_tokens]
            if len(self._largest):
                self._largest[tail.dst, ..., : tail.n_tokens] = self._largest[tail.src, ..., : tail.n_tokens]

    def drop(self, sequence: int) -> None:
        """Nothing is kept for a sequence besides its pages."""

    def _kernel(self, heads: int, capped: bool) -> Kernel:
        if (kernel := self._kernels.get((heads, capped))) is None:
            s, element = self._shape, str(self._shape.dtype).removeprefix("torch.")
            geometry = Geometry(heads, s.num_kv_heads, s.head_dim, s.page_size, element, capped)
            kernel = self._kernels[heads, capped] = attention_kernel(geometry)
            self._partial_size = max(self._partial_size, geometry.partial_size)
        return kernel


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, D] float32 whose heads are adjacent; tokens may be apart."""
    x = x.float()
    return x if _is_in_rows(x) else x.contiguous()


def _is_in_rows(x: torch.Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.stride()[1:] == (x.shape[2], 1)


def _work(rows: Sequence[AttentionRow], tables: StepTables, window: int | None) -> _Work:
    jobs: list[tuple[int, ...]] = []
    merges: list[tuple[int, ...]] = []
    partials = 0
    for row, offset, table in zip(rows, tables.token_offsets, tables.page_offsets, strict=False):
        for part in range(0, row.count, MANY):
            count, position = min(MANY, row.count - part), row.start + part
            end = position + count
            first = 0 if window is None else max(0, position - window + 1) // _KEYS_IN_STEP * _KEYS_IN_STEP
            stretches = [(first, end)]
            if count <= MOST_FEW:
                starts = range(first // STRETCH * STRETCH, end, STRETCH)
                stretches = [(max(first, start), min(start + STRETCH, end)) for start in starts]
            if len(stretches) > 1:
                merges.append((offset + part, count, partials, len(stretches)))
            for start, stop in stretches:
                partial = -1
                if len(stretches) > 1:
                    partial, partials = partials, partials + 1
                jobs.append((offset + part, count, position, table, start, stop, partial))
    return _Work(np.array(jobs, dtype=np.int64), np.array(merges, dtype=np.int64).reshape(-1, 4), partials)
