"""FlashInfer's wrappers for one kind of layers, and what they are planned with."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import torch

from engine.attention.base import LayerAttention
from engine.attention.cascade import Cascade
from engine.attention.fixed_decode import DecodeForm, Places, SharedPlaces
from engine.attention.paged_kv import PagedKV
from engine.attention.shared_prefixes import SharedTables
from engine.attention.step_tables import Ints, StepTables
from engine.attention.transfers import Staged

LAYOUT = "NHD"
_KERNELS = "fa2"  # those that have windows, soft caps, graphs and pages of any size on every card


class TableArrays(NamedTuple):
    """Of StepTables, in both places."""

    token_offsets: Staged
    page_offsets: Staged
    last_page_len: Staged
    pages: Staged
    token_rows: Staged
    positions: Staged
    fresh: Staged


class SharedArrays(NamedTuple):
    """Of SharedTables, in both places."""

    query_offsets: Staged
    page_offsets: Staged
    pages: Staged
    last_page_len: Staged
    order: Staged
    inverse: Staged


class LayerPlan(NamedTuple):
    """wrapper: or a Cascade of two, planned. places: where new keys and values go."""

    wrapper: Any
    places: Places


@dataclass(frozen=True, slots=True)
class Kernels:
    """What all wrappers are made with, and planned with. num_heads: of queries."""

    flashinfer: Any
    kv: PagedKV
    num_heads: int
    workspace: torch.Tensor

    def prefill(self, fixed: SharedPlaces | None) -> Any:
        return self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self.workspace,
            LAYOUT,
            use_cuda_graph=fixed is not None,
            qo_indptr_buf=fixed.query_offsets if fixed is not None else None,
            paged_kv_indptr_buf=fixed.page_offsets if fixed is not None else None,
            paged_kv_indices_buf=fixed.pages if fixed is not None else None,
            paged_kv_last_page_len_buf=fixed.last_page_len if fixed is not None else None,
            backend=_KERNELS,
        )

    def decode(self, fixed: Places | None) -> Any:
        """On tensor cores whatever the group of query heads is: the other kernels know only some sizes of it."""
        return self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace,
            LAYOUT,
            use_cuda_graph=fixed is not None,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=fixed.page_offsets if fixed is not None else None,
            paged_kv_indices_buffer=fixed.pages if fixed is not None else None,
            paged_kv_last_page_len_buffer=fixed.last_page_len if fixed is not None else None,
            backend=_KERNELS,
        )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        shape = self.kv.shape
        return self.num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size


class LayerKind:
    """Layers with the same window, soft cap and scale.

    Steps of single tokens with fixed buffers have wrappers of their own, by the number of rows.
    """

    def __init__(
        self,
        kernels: Kernels,
        layer: LayerAttention,
        places: dict[int, Places],
        shared_places: dict[int, SharedPlaces] | None,
    ) -> None:
        """layer: with its scale. places, shared_places: fixed buffers. shared_places: None where the layers are never
        computed in two parts."""
        self.shares = shared_places is not None
        self._kernels = kernels
        self._options = options_of(layer, kernels.kv)
        self._places = places
        self._shared_places = shared_places or {}
        self._prefill = kernels.prefill(None)
        self._decode = kernels.decode(None)
        self._fixed = {rows: kernels.decode(buffers) for rows, buffers in places.items()}
        self._fixed_shared = {rows: kernels.prefill(buffers) for rows, buffers in self._shared_places.items()}

    def plan_prefill(self, arrays: TableArrays) -> LayerPlan:
        self._prefill.plan(
            arrays.token_offsets.host,
            arrays.page_offsets.host,
            arrays.pages.device,
            arrays.last_page_len.host,
            *self._kernels.sizes,
            causal=True,
            **self._options,
        )
        return LayerPlan(self._prefill, _places(arrays))

    def plan_decode(self, arrays: TableArrays, form: DecodeForm | None) -> LayerPlan:
        """form: None for a step without fixed buffers."""
        wrapper = self._fixed[form.rows] if form is not None else self._decode
        wrapper.plan(
            arrays.page_offsets.host,
            arrays.pages.device,
            arrays.last_page_len.host,
            *self._kernels.sizes,
            **self._options,
        )
        return LayerPlan(wrapper, self._places[form.rows] if form is not None else _places(arrays))

    def plan_shared(self, own: TableArrays, shared: SharedArrays, form: DecodeForm | None) -> LayerPlan:
        """In two parts; own: cut to what each row has for itself."""
        second, places = self.plan_decode(own, form)
        first = self._fixed_shared[form.rows] if form is not None else self._prefill
        first.plan(
            shared.query_offsets.host,
            shared.page_offsets.host,
            shared.pages.device,
            shared.last_page_len.host,
            *self._kernels.sizes,
            causal=False,
            **self._options,
        )
        order, inverse = shared.order.device, shared.inverse.device
        if form is not None:
            order, inverse = self._shared_places[form.rows].order, self._shared_places[form.rows].inverse
        cascade = Cascade(self._kernels.flashinfer, first, second, order, inverse)
        return LayerPlan(cascade, replace(places, token_rows=inverse))


def options_of(layer: LayerAttention, kv: PagedKV) -> dict[str, Any]:
    """What `plan` is told besides the tables, nothing left to its defaults. window_left does not count the token."""
    return {
        "window_left": layer.window_left,
        "logits_soft_cap": layer.softcap if layer.softcap is not None else 0.0,
        "sm_scale": layer.scale,
        "q_data_type": kv.attend_dtype,
        "kv_data_type": kv.shape.dtype,
    }


_Named = TypeVar("_Named", TableArrays, SharedArrays)


def arrays_of(tables: StepTables | SharedTables, names: type[_Named]) -> list[Ints]:
    """Those that `names` has, in its order."""
    return [getattr(tables, name) for name in names._fields]


def _places(arrays: TableArrays) -> Places:
    return Places(*(getattr(arrays, field.name).device for field in fields(Places)))
