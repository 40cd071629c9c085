"""Attention on CUDA by FlashInfer: K and V stay in pages, and kernels read them through page tables.

A step whose rows all compute one token goes to the decode wrapper, any other to the prefill wrapper, for which a
decoding row is a prompt of one token. Both are planned once a step, for each kind of layer that there is:

    plan    page tables -> one copy to the device -> stale pages cleared -> a plan for each kind of layer -> fence
    run     K and V appended to their pages -> the wrapper of the layer's kind

Steps of single tokens may have fixed buffers (`FixedDecode`), so that a CUDA graph which was captured over `run` reads
what the newest `plan` wrote. A step that is smaller than the captured one is filled up with `padding`.

Sources: FlashInfer (arXiv 2501.01005); signatures and limits as in flashinfer-python 0.6.13 and 0.7.4.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch

from cache import TailCopy
from engine.attention.base import AttentionRow, LayerAttention, layers_of, scale_of
from engine.attention.compiling import compile_settings
from engine.attention.kv_scales import FP8
from engine.attention.paged_kv import PagedKV
from engine.attention.step_tables import StepTables
from engine.attention.transfers import Staged, Staging, transfers_for
from engine.errors import AttentionUnavailable
from engine.folders import xdg_folder

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)

_LAYOUT = "NHD"
_KERNELS = "fa2"  # those that have windows, soft caps, graphs and pages of any size on every card
_LEAST_WORKSPACE = 128 << 20
_LARGEST_TILE = 128
_BLOCKS_PER_MULTIPROCESSOR = 2


def unsupported(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why FlashInfer cannot serve such keys and values; None: it can."""
    if head_dim not in HEAD_DIMS:
        return f"FlashInfer has no kernels for heads of {head_dim} elements, only for {_listed(HEAD_DIMS)}"
    if dtype not in (*DTYPES, FP8):
        return f"FlashInfer has no kernels for {dtype}, only for {_listed((*DTYPES, FP8))}"
    return None


@dataclass(frozen=True, slots=True)
class FixedDecode:
    """Steps of single tokens that keep their buffers from step to step.

    batches: numbers of rows. most_pages: the most page numbers that all rows of a step may have together, a page that
    several of them share counted for each; a step with more is planned without fixed buffers.
    """

    batches: tuple[int, ...]
    most_pages: int


@dataclass(frozen=True, slots=True)
class _Places:
    """Where new keys and values go: int32 on the device, as append_paged_kv_cache wants them (see StepTables)."""

    token_rows: torch.Tensor
    positions: torch.Tensor
    pages: torch.Tensor
    page_offsets: torch.Tensor
    last_page_len: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """Layers with the same window, soft cap and scale, and the wrappers for them. fixed: by the number of rows."""

    options: LayerAttention
    prefill: Any
    decode: Any
    fixed: dict[int, Any]


@dataclass(frozen=True, slots=True)
class _Step:
    """wrappers: one for each layer."""

    wrappers: tuple[Any, ...]
    places: _Places


class _Arrays(NamedTuple):
    """Of StepTables, in both places."""

    token_offsets: Staged
    page_offsets: Staged
    last_page_len: Staged
    pages: Staged
    token_rows: Staged
    positions: Staged
    fresh: Staged


class FlashInferAttention:
    """The AttentionBackend for CUDA. Queries are attended with, and results given, in the `attend_dtype` of `kv`."""

    def __init__(
        self,
        kv: PagedKV,
        layers: Sequence[LayerAttention] | None,
        num_heads: int,
        fixed: FixedDecode | None = None,
    ) -> None:
        """layers: one for each layer of the shape; None: all of them plain. num_heads: of the queries.

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
        self._sizes = (num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size)
        self._staging = Staging(transfers_for(kv.device), kv.device)
        self._workspace = torch.zeros(_workspace_bytes(kv, num_heads), dtype=torch.uint8, device=kv.device)
        self._fixed = _fixed_places(fixed, kv.device) if fixed is not None else {}
        exact = [replace(layer, scale=scale_of(layer, shape.head_dim)) for layer in layers_of(shape, layers)]
        kinds = {options: self._kind(options) for options in dict.fromkeys(exact)}
        self._kinds = tuple(kinds.values())
        self._kind_of_layer = tuple(kinds[options] for options in exact)
        self._step: _Step | None = None

    @property
    def fixed_rows(self) -> int | None:
        """The number of rows whose fixed buffers the planned step uses; None: no graph may be replayed for it."""
        if self._step is None:
            return None
        return next((rows for rows, places in self._fixed.items() if places is self._step.places), None)

    def plan(self, rows: Sequence[AttentionRow]) -> None:
        """See AttentionBackend. Raises ValueError for rows without tokens or with too few pages."""
        self._step = None
        tables = StepTables.build(rows, self._kv.shape.page_size)
        with self._staging.step([getattr(tables, name) for name in _Arrays._fields]) as staged:
            arrays = _Arrays(*staged)
            self._kv.clear(arrays.fresh.device)
            if tables.single:
                self._step = self._plan_decode(arrays)
            else:
                self._step = self._plan_prefill(arrays)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._step is None:
            raise RuntimeError("a layer was run before its step was planned")
        places, kv = self._step.places, self._kv.layer(layer)
        self._flashinfer.append_paged_kv_cache(
            *self._kv.stored(layer, k, v),
            places.token_rows,
            places.positions,
            kv,
            places.pages,
            places.page_offsets,
            places.last_page_len,
            kv_layout=_LAYOUT,
        )
        wrapper, q = self._step.wrappers[layer], q.to(self._kv.attend_dtype)
        attended: torch.Tensor = wrapper.run(q, kv, **self._scales(layer))
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

    def _plan_prefill(self, arrays: _Arrays) -> _Step:
        for kind in self._kinds:
            kind.prefill.plan(
                arrays.token_offsets.host,
                arrays.page_offsets.host,
                arrays.pages.device,
                arrays.last_page_len.host,
                *self._sizes,
                causal=True,
                **_options(kind.options, self._kv),
            )
        return _Step(tuple(kind.prefill for kind in self._kind_of_layer), _places(arrays))

    def _plan_decode(self, arrays: _Arrays) -> _Step:
        rows = len(arrays.last_page_len.host)
        places = self._fixed.get(rows)
        if places is not None and len(arrays.pages.host) > len(places.pages):
            places = None
        wrappers = {kind: kind.fixed[rows] if places is not None else kind.decode for kind in self._kinds}
        for kind, wrapper in wrappers.items():
            wrapper.plan(
                arrays.page_offsets.host,
                arrays.pages.device,
                arrays.last_page_len.host,
                *self._sizes,
                **_options(kind.options, self._kv),
            )
        if places is not None:
            places.positions.copy_(arrays.positions.device)
        return _Step(tuple(wrappers[kind] for kind in self._kind_of_layer), places or _places(arrays))

    def _kind(self, options: LayerAttention) -> _Kind:
        prefill = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, _LAYOUT, backend=_KERNELS)
        fixed = {rows: self._decode_wrapper(places) for rows, places in self._fixed.items()}
        return _Kind(options, prefill, self._decode_wrapper(None), fixed)

    def _decode_wrapper(self, fixed: _Places | None) -> Any:
        """On tensor cores whatever the group of query heads is: the other kernels know only some sizes of it."""
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            _LAYOUT,
            use_cuda_graph=fixed is not None,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=fixed.page_offsets if fixed is not None else None,
            paged_kv_indices_buffer=fixed.pages if fixed is not None else None,
            paged_kv_last_page_len_buffer=fixed.last_page_len if fixed is not None else None,
            backend=_KERNELS,
        )


def _load(device: torch.device) -> Any:
    if device.type == "cuda":  # read when a kernel is compiled
        os.environ.update(compile_settings(os.environ, xdg_folder("XDG_CACHE_HOME", ".cache") / "chatd" / "link"))
    try:
        return import_module("flashinfer")
    except ImportError as error:
        raise AttentionUnavailable(f"FlashInfer cannot be loaded: {error}") from error


def _options(layer: LayerAttention, kv: PagedKV) -> dict[str, Any]:
    """What `plan` is told besides the tables, nothing left to its defaults. window_left does not count the token."""
    return {
        "window_left": layer.window - 1 if layer.window is not None else -1,
        "logits_soft_cap": layer.softcap if layer.softcap is not None else 0.0,
        "sm_scale": layer.scale,
        "q_data_type": kv.attend_dtype,
        "kv_data_type": kv.shape.dtype,
    }


def _places(arrays: _Arrays) -> _Places:
    return _Places(
        arrays.token_rows.device,
        arrays.positions.device,
        arrays.pages.device,
        arrays.page_offsets.device,
        arrays.last_page_len.device,
    )


def _fixed_places(fixed: FixedDecode, device: torch.device) -> dict[int, _Places]:
    """By the number of rows. All share the page numbers: `plan` writes them anew."""
    pages = torch.zeros(fixed.most_pages, dtype=torch.int32, device=device)

    def zeros(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    return {
        rows: _Places(
            torch.arange(rows, dtype=torch.int32, device=device), zeros(rows), pages, zeros(rows + 1), zeros(rows)
        )
        for rows in fixed.batches
    }


def _workspace_bytes(kv: PagedKV, num_heads: int) -> int:
    """What FA2 needs at most where it splits the keys of a sequence: a tile in float32, with its sum, for each block of
    threads and each query head of a group (PrefillPlan in FlashInfer's scheduler.cuh)."""
    cuda = kv.device.type == "cuda"
    blocks = torch.cuda.get_device_properties(kv.device).multi_processor_count if cuda else 1
    group, tile = num_heads // kv.shape.num_kv_heads, 4 * _LARGEST_TILE * (kv.shape.head_dim + 1)
    return max(_LEAST_WORKSPACE, _BLOCKS_PER_MULTIPROCESSOR * blocks * group * tile)


def _listed(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)
