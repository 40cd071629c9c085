"""Attention on CUDA by FlashInfer: K and V stay in pages, and kernels read them through page tables.

A step whose rows all compute one token goes to the decode wrapper, any other to the prefill wrapper, for which a
decoding row is a prompt of one token. Both are planned once a step, for each kind of layer that there is:

    plan    page tables -> one copy to the device -> stale pages cleared -> a plan for each kind of layer -> fence
    run     K and V appended to their pages -> the wrapper of the layer's kind

Steps of single tokens may have fixed buffers (`FixedDecode`), so that a CUDA graph which was captured over `run` reads
what the newest `plan` wrote. A step that is smaller than the captured one is filled up with `padding`.

Where rows of single tokens begin with the same pages (shared_prefixes.py), layers without a window are computed in two
parts (cascade.py), for which the page tables are cut: the tables of a row then begin behind what it shares.

Sources: FlashInfer (arXiv 2501.01005); signatures and limits as in flashinfer-python 0.6.13 and 0.7.4.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import torch

from cache import TailCopy
from engine.attention.base import AttentionRow, LayerAttention, layers_of, scale_of
from engine.attention.cascade import LEAST_SAVED, MOST_GROUPS, can_merge, compile_merging, requests_of
from engine.attention.compiling import compile_settings
from engine.attention.fixed_decode import DecodeForm, FixedDecode, places_for, shared_places_for
from engine.attention.flashinfer_layers import (
    LAYOUT,
    Kernels,
    LayerKind,
    LayerPlan,
    SharedArrays,
    TableArrays,
    arrays_of,
)
from engine.attention.kv_scales import FP8
from engine.attention.paged_kv import PagedKV
from engine.attention.shared_prefixes import Group, SharedPrefixes, SharedTables
from engine.attention.step_tables import StepTables
from engine.attention.transfers import Staging, transfers_for
from engine.attention.workspace import workspace_bytes
from engine.errors import AttentionUnavailable
from engine.folders import xdg_folder

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)


def unsupported(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why FlashInfer cannot serve such keys and values; None: it can."""
    if head_dim not in HEAD_DIMS:
        return f"FlashInfer has no kernels for heads of {head_dim} elements, only for {_listed(HEAD_DIMS)}"
    if dtype not in (*DTYPES, FP8):
        return f"FlashInfer has no kernels for {dtype}, only for {_listed((*DTYPES, FP8))}"
    return None


class FlashInferAttention:
    """The AttentionBackend for CUDA. Queries are attended with, and results given, in the `attend_dtype` of `kv`."""

    def __init__(
        self,
        kv: PagedKV,
        layers: Sequence[LayerAttention] | None,
        num_heads: int,
        fixed: FixedDecode | None = None,
        least_saved: int | None = LEAST_SAVED,
    ) -> None:
        """layers: one for each layer of the shape; None: all of them plain. num_heads: of the queries. least_saved:
        bytes that a layer need not read where it is computed in two parts; None: it never is.

        Raises AttentionUnavailable where FlashInfer is not installed or lacks the kernels.
        """
        shape = kv.shape
        if (reason := unsupported(shape.head_dim, shape.dtype)) is not None:
            raise AttentionUnavailable(reason)
        if kv.attend_dtype not in DTYPES:
            raise AttentionUnavailable(f"FlashInfer attends in {_listed(DTYPES)}, not in {kv.attend_dtype}")
        if num_heads % shape.num_kv_heads != 0:
            raise ValueError(f"{num_heads} query heads cannot share {shape.num_kv_heads} heads of keys and values")
        self._flashinfer = _load(kv.device)
        self._kv = kv
        self._staging = Staging(transfers_for(kv.device), kv.device)
        self._fixed = fixed if fixed is not None else FixedDecode((), 0)
        exact = [replace(layer, scale=scale_of(layer, shape.head_dim)) for layer in layers_of(shape, layers)]
        may_share = least_saved is not None and can_merge(num_heads, shape.head_dim)
        sharing = {options: may_share and options.window is None for options in exact}
        self._least_shared: int | None = None
        requests: dict[int, int] = {}
        if least_saved is not None and any(sharing.values()):
            self._least_shared = max(1, -(-least_saved * shape.num_layers * shape.page_size // shape.page_bytes))
            requests = {rows: requests_of(rows) for rows in self._fixed.batches if self._may_share(rows)}
            compile_merging(self._flashinfer, num_heads, shape.head_dim, kv.attend_dtype, kv.device)
        self._places = {shares: places_for(self._fixed, kv.device) for shares in set(sharing.values())}
        self._shared_places = shared_places_for(self._fixed, requests, kv.device)
        needed = workspace_bytes(kv, num_heads, self._fixed.batches)
        workspace = torch.zeros(needed, dtype=torch.uint8, device=kv.device)
        kernels = Kernels(self._flashinfer, kv, num_heads, workspace)
        kinds = {
            options: LayerKind(kernels, options, self._places[shares], self._shared_places if shares else None)
            for options, shares in sharing.items()
        }
        self._kinds = tuple(kinds.values())
        self._kind_of_layer = tuple(kinds[options] for options in exact)
        self._layers: tuple[LayerPlan, ...] | None = None
        self._form: DecodeForm | None = None

    @property
    def forms(self) -> tuple[DecodeForm, ...]:
        """Of steps with fixed buffers."""
        plain = tuple(DecodeForm(rows) for rows in self._fixed.batches)
        return (*plain, *(DecodeForm(rows, shared=True) for rows in self._shared_places))

    @property
    def form(self) -> DecodeForm | None:
        """Of the planned step; None: it has no fixed buffers, and no graph may be replayed for it."""
        return self._form

    def plan(self, rows: Sequence[AttentionRow]) -> None:
        """See AttentionBackend. Raises ValueError for rows without tokens or with too few pages."""
        self._layers = self._form = None
        tables = StepTables.build(rows, self._kv.shape.page_size)
        if tables.single:
            self._plan_decode(tables, self._find_shared(tables))
        else:
            self._plan_prefill(tables)

    def plan_form(self, form: DecodeForm) -> None:
        """Plans a step of that form whose rows are nobody's, to be captured."""
        self._layers = self._form = None
        size = self._kv.shape.page_size
        rows = self.padding(form.rows)
        if not form.shared:
            self._plan_decode(StepTables.build(rows, size), None)
            return
        longer = [replace(row, pages=np.repeat(row.pages, 2), start=size, capacity=size + 1) for row in rows]
        tables = StepTables.build(longer, size)
        self._plan_decode(tables, SharedPrefixes(tables, size, (Group(tuple(range(form.rows)), 1),)))

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._layers is None:
            raise RuntimeError("a layer was run before its step was planned")
        (wrapper, places), kv = self._layers[layer], self._kv.layer(layer)
        self._flashinfer.append_paged_kv_cache(
            *self._kv.stored(layer, k, v),
            places.token_rows,
            places.positions,
            kv,
            places.pages,
            places.page_offsets,
            places.last_page_len,
            kv_layout=LAYOUT,
        )
        attended: torch.Tensor = wrapper.run(q.to(self._kv.attend_dtype), kv, **self._scales(layer))
        return attended

    def fork(self, source: int, target: int, tokens: int, tail: TailCopy | None) -> None:
        if tail is not None:
            self._kv.copy_tail(tail)

    def drop(self, sequence: int) -> None:
        """Does nothing: a sequence is its pages."""

    def padding(self, count: int) -> list[AttentionRow]:
        """Rows of one token that fill up a step; what they write goes to a page that belongs to nobody."""
        page = np.array([self._kv.spare_page], dtype=np.int32)
        return [AttentionRow(-1 - index, page, 0, 1, 1) for index in range(count)]

    def _scales(self, layer: int) -> dict[str, float]:
        """Numbers, which a captured graph keeps: they never change."""
        if not self._kv.scaled:
            return {}
        for_keys, for_values = self._kv.scales(layer)
        return {"k_scale": for_keys, "v_scale": for_values}

    def _may_share(self, rows: int) -> bool:
        """Whether a step of so many rows can be planned in two parts with fixed buffers, also for `plan_form`."""
        return 2 <= rows <= self._fixed.most_pages // 2

    def _find_shared(self, tables: StepTables) -> SharedPrefixes | None:
        if self._least_shared is None:
            return None
        return SharedPrefixes.find(tables, self._kv.shape.page_size, self._least_shared, MOST_GROUPS)

    def _plan_prefill(self, tables: StepTables) -> None:
        with self._staging.step(arrays_of(tables, TableArrays)) as staged:
            arrays = TableArrays(*staged)
            self._kv.clear(arrays.fresh.device)
            planned = {kind: kind.plan_prefill(arrays) for kind in self._kinds}
            self._layers = tuple(planned[kind] for kind in self._kind_of_layer)

    def _plan_decode(self, tables: StepTables, prefixes: SharedPrefixes | None) -> None:
        """prefixes: None for a step in one part. In two, layers that share have page tables of their own."""
        rows, each, shared = len(tables.positions), [tables], None
        if prefixes is not None:
            own, shared = prefixes.parts(requests_of(rows) if rows in self._shared_places else None)
            each = [own, tables] if len(self._places) > 1 else [own]
        form = self._form_of(rows, each, shared)
        sent = [array for one in each for array in arrays_of(one, TableArrays)]
        sent += arrays_of(shared, SharedArrays) if shared is not None else []
        with self._staging.step(sent) as staged:
            size, end = len(TableArrays._fields), len(each) * len(TableArrays._fields)
            first, last = TableArrays(*staged[:size]), TableArrays(*staged[end - size : end])
            common = SharedArrays(*staged[end:]) if shared is not None else None
            self._kv.clear(first.fresh.device)
            planned = {
                kind: kind.plan_shared(first, common, form)
                if kind.shares and common is not None
                else kind.plan_decode(last, form)
                for kind in self._kinds
            }
            if form is not None:
                for shares, places in self._places.items():
                    places[rows].positions.copy_((first if shares else last).positions.device)
                if common is not None:
                    self._shared_places[rows].order.copy_(common.order.device)
                    self._shared_places[rows].inverse.copy_(common.inverse.device)
            self._layers, self._form = tuple(planned[kind] for kind in self._kind_of_layer), form

    def _form_of(self, rows: int, each: Sequence[StepTables], shared: SharedTables | None) -> DecodeForm | None:
        """None: the step does not fit into fixed buffers."""
        pages = [one.pages for one in each] + ([shared.pages] if shared is not None else [])
        there = self._fixed.batches if shared is None else self._shared_places
        fits = rows in there and max(map(len, pages)) <= self._fixed.most_pages
        return DecodeForm(rows, shared is not None) if fits else None


def _load(device: torch.device) -> Any:
    if device.type == "cuda":  # read when a kernel is compiled
        os.environ.update(compile_settings(os.environ, xdg_folder("XDG_CACHE_HOME", ".cache") / "chatd" / "link"))
    try:
        return import_module("flashinfer")
    except ImportError as error:
        raise AttentionUnavailable(f"FlashInfer cannot be loaded: {error}") from error


def _listed(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)
