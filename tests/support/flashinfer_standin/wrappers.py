"""The two wrappers. Signatures as in flashinfer-python, but that options can only be given by name, as 0.7 wants it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch

from tests.support.flashinfer_standin import checks
from tests.support.flashinfer_standin.attend import Scores, attend
from tests.support.flashinfer_standin.checks import Rules
from tests.support.flashinfer_standin.stream import Stream


@dataclass(frozen=True)
class _Plan:
    """q_offsets, page_offsets, last_page_len: as they were; pages: on the device, read by each run."""

    q_offsets: list[int]
    page_offsets: list[int]
    last_page_len: list[int]
    pages: torch.Tensor
    heads: tuple[int, int, int, int]
    dtypes: tuple[torch.dtype, torch.dtype]
    scores: Scores


class Wrapper:
    """What both have in common. Subclasses made by the stand-in know its stream, its rules, its count of calls, and
    the workspaces that somebody still has."""

    stream: Stream
    rules: Rules
    calls: Counter[str]
    workspaces: WeakValueDictionary[int, torch.Tensor]

    def _begin(self, workspace: torch.Tensor, kv_layout: str, backend: str, **unknown: tuple[Any, Any]) -> None:
        checks.workspace(workspace, self.stream)
        checks.defaults(**unknown)
        assert kv_layout == "NHD", f"the stand-in does not know kv_layout={kv_layout!r}"
        assert backend == "fa2", f"backend {backend!r}: chosen by the card, so not proven here"
        self._workspace = self.workspaces[id(workspace)] = workspace
        self._plan: _Plan | None = None
        self._number = 0

    def _check_pages(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        page_size: int,
        *,
        empty: bool = False,
    ) -> None:
        """All three of one step. Called first in a plan, which writes the wrapper's own pinned memory. empty: rows may
        have no pages."""
        assert self._number <= self.stream.arrived, "a plan before the copies of the last one have ended"
        checks.integers("last_page_len", last_page_len, self.stream, on_host=True)
        checks.integers("indptr", indptr, self.stream, on_host=True, size=len(last_page_len) + 1)
        checks.offsets("indptr", indptr, empty=empty)
        checks.integers("indices", indices, self.stream, on_host=False, size=int(indptr[-1]))
        checks.in_range("last_page_len", last_page_len, 1, page_size)

    def _copied(self, *host: torch.Tensor) -> None:
        """The arrays, and the wrapper's own pinned memory, are on their way until a later fence was waited for."""
        for tensor in host:
            self.stream.copy_from(tensor)
        self._number = self.stream.issued

    def _check_run(self, q: torch.Tensor, kv: Any, k_scale: Any, v_scale: Any, unknown: dict[str, Any]) -> _Plan:
        plan = self._plan
        assert plan is not None, "run without a plan"
        checks.defaults(**{name: (value, None) for name, value in unknown.items()})
        checks.kv_scales(k_scale, v_scale, plan.dtypes[1])
        q_heads, kv_heads, head_dim, page_size = plan.heads
        checks.floats("q", q, (plan.q_offsets[-1], q_heads, head_dim), plan.dtypes[0], self.stream)
        assert isinstance(kv, torch.Tensor), "the stand-in wants K and V in one tensor"
        checks.floats("kv", kv, (len(kv), 2, page_size, kv_heads, head_dim), plan.dtypes[1], self.stream)
        checks.in_range("indices", plan.pages, 0, len(kv) - 1)
        group, tile = q_heads // kv_heads, 4 * 128 * (head_dim + 1)
        assert len(self._workspace) >= 2 * group * tile, f"a workspace of {len(self._workspace)} bytes is too small"
        return plan

    def _check_workspace(self, rows: int, requests: int, heads: int, kv_heads: int, head_dim: int) -> None:
        """A plan with fixed buffers makes room for as many tiles as there may ever be (PrefillSplitQOKVIndptr)."""
        assert requests <= rows, f"{requests} requests of {rows} rows: the longest one's length would be below zero"
        longest, lines = (rows - requests + 1) * (heads // kv_heads), rows * heads // kv_heads
        tile = 128 if longest > 64 and head_dim < 256 else 64 if longest > 16 else 16
        needed = 4 * heads * (-(-lines // tile) + requests - 1) * tile * (head_dim + 1)
        assert len(self._workspace) >= needed, f"a workspace of {len(self._workspace)} bytes, and {needed} are needed"

    def _attend(
        self, q: torch.Tensor, kv: torch.Tensor, k_scale: Any, v_scale: Any, plan: _Plan, return_lse: bool
    ) -> Any:
        """As the real one does: the scale of keys goes into that of scores, that of values over the results."""
        pages = plan.pages.tolist()
        scores = plan.scores if k_scale is None else replace(plan.scores, scale=plan.scores.scale * k_scale)
        out, log_sums = attend(q, kv, plan.q_offsets, plan.page_offsets, pages, plan.last_page_len, scores)
        out = out.to(plan.dtypes[0]) * (1.0 if v_scale is None else v_scale)
        return (out, log_sums.contiguous()) if return_lse else out


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._begin(
            float_workspace_buffer,
            kv_layout,
            backend,
            custom_mask_buf=(custom_mask_buf, None),
            mask_indptr_buf=(mask_indptr_buf, None),
            jit_args=(jit_args, None),
            jit_kwargs=(jit_kwargs, None),
        )
        self._most_rows: int | None = None
        self._buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        given = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        if not use_cuda_graph:
            assert given == (None, None, None, None), "buffers without use_cuda_graph are overwritten by the next plan"
            return
        queries, indptr, indices, last_page_len = given
        assert queries is not None
        assert indptr is not None
        assert indices is not None
        assert last_page_len is not None
        size = len(last_page_len) + 1
        checks.integers("qo_indptr_buf", queries, self.stream, on_host=False, size=size)
        checks.integers("paged_kv_indptr_buf", indptr, self.stream, on_host=False, size=size)
        checks.integers("paged_kv_indices_buf", indices, self.stream, on_host=False)
        checks.integers("paged_kv_last_page_len_buf", last_page_len, self.stream, on_host=False)
        self._buffers = (queries, indptr, indices, last_page_len)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        self.calls["prefill plan" if causal else "shared plan"] += 1
        assert type(causal) is bool
        self._check_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, empty=not causal)
        checks.integers("qo_indptr", qo_indptr, self.stream, on_host=True, size=len(paged_kv_indptr))
        checks.offsets("qo_indptr", qo_indptr, empty=not causal)
        lengths = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        if causal:
            assert bool((qo_indptr.diff() <= lengths).all()), "a row has more queries than keys"
        else:
            assert window_left == -1, "what a window hides depends on how many rows share"
        checks.heads(num_qo_heads, num_kv_heads, head_dim_qk, page_size, self.rules)
        checks.dtypes(q_data_type, kv_data_type, self.rules)
        checks.scores(window_left, logits_soft_cap, sm_scale)
        checks.defaults(
            head_dim_vo=(head_dim_vo, None),
            custom_mask=(custom_mask, None),
            packed_custom_mask=(packed_custom_mask, None),
            pos_encoding_mode=(pos_encoding_mode, "NONE"),
            use_fp16_qk_reduction=(use_fp16_qk_reduction, False),
            rope_scale=(rope_scale, None),
            rope_theta=(rope_theta, None),
            o_data_type=(o_data_type, None),
            non_blocking=(non_blocking, True),
            prefix_len_ptr=(prefix_len_ptr, None),
            token_pos_in_items_ptr=(token_pos_in_items_ptr, None),
            token_pos_in_items_len=(token_pos_in_items_len, 0),
            max_item_len_ptr=(max_item_len_ptr, None),
            seq_lens=(seq_lens, None),
            seq_lens_q=(seq_lens_q, None),
            block_tables=(block_tables, None),
            max_token_per_sequence=(max_token_per_sequence, None),
            max_sequence_kv=(max_sequence_kv, None),
            fixed_split_size=(fixed_split_size, None),
            disable_split_kv=(disable_split_kv, False),
        )
        self._copied(qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        self._plan = _Plan(
            qo_indptr.tolist(),
            paged_kv_indptr.tolist(),
            paged_kv_last_page_len.tolist(),
            self._keep(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            (q_data_type, kv_data_type),  # type: ignore[arg-type]
            Scores(window_left, logits_soft_cap or 0.0, sm_scale or 0.0, causal),
        )
        if self._buffers is not None:
            assert self._most_rows is not None
            self._check_workspace(self._most_rows, len(qo_indptr) - 1, num_qo_heads, num_kv_heads, head_dim_qk)

    def _keep(
        self, queries: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor
    ) -> torch.Tensor:
        """Writes the fixed buffers, where there are such; gives where runs find the page numbers. The first plan fixes
        how many rows there may be."""
        if self._buffers is None:
            return indices
        kept_queries, kept_indptr, kept_indices, kept_last = self._buffers
        assert len(last_page_len) == len(kept_last), f"{len(last_page_len)} requests in buffers for {len(kept_last)}"
        assert len(indices) <= len(kept_indices), f"{len(indices)} pages in a buffer for {len(kept_indices)}"
        rows = int(queries[-1])
        self._most_rows = rows if self._most_rows is None else self._most_rows
        assert rows <= self._most_rows, f"{rows} rows, and the first plan had {self._most_rows}"
        kept_queries.copy_(queries)
        kept_indptr.copy_(indptr)
        kept_last.copy_(last_page_len)
        kept_indices[: len(indices)] = indices
        return kept_indices[: len(indices)]

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> Any:
        self.calls["prefill run"] += 1
        assert not args
        unknown = {
            "q_scale": q_scale,
            "out": out,
            "lse": lse,
            "enable_pdl": enable_pdl,
            "window_left": window_left,
            "sinks": sinks,
            "kv_cache_sf": kv_cache_sf,
            "skip_softmax_threshold_scale_factor": skip_softmax_threshold_scale_factor,
        }
        if self.stream.recorder is not None:
            assert self._buffers is not None, "a graph would read the tables of another step"
        return self.stream.launch(lambda: self._prefill(q, paged_kv_cache, k_scale, v_scale, unknown, return_lse))

    def _prefill(
        self, q: torch.Tensor, kv: Any, k_scale: Any, v_scale: Any, unknown: dict[str, Any], return_lse: bool
    ) -> Any:
        """Keys that all rows of a request see may not be of this step: it is not known whose they are."""
        plan = self._check_run(q, kv, k_scale, v_scale, unknown)
        if self._buffers is not None:
            queries, indptr, _, last_page_len = self._buffers
            planned = (plan.q_offsets, plan.page_offsets, plan.last_page_len)
            there = (queries.tolist(), indptr.tolist(), last_page_len.tolist())
            assert planned == there, "the buffers hold a step that was not planned"
        if not plan.scores.causal:
            written = self.stream.written.get(kv.data_ptr(), set()) & set(plan.pages.tolist())
            assert not written, f"the pages {sorted(written)} are shared, and written to in this step"
        return self._attend(q, kv, k_scale, v_scale, plan, return_lse)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        self._begin(float_workspace_buffer, kv_layout, backend, jit_args=(jit_args, None))
        self._use_tensor_cores = use_tensor_cores
        self._buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        given = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        if not use_cuda_graph:
            assert given == (None, None, None), "buffers without use_cuda_graph are overwritten by the next plan"
            return
        indptr, indices, last_page_len = given
        assert indptr is not None
        assert indices is not None
        assert last_page_len is not None
        checks.integers("paged_kv_indices_buffer", indices, self.stream, on_host=False)
        checks.integers("paged_kv_last_page_len_buffer", last_page_len, self.stream, on_host=False)
        size = len(last_page_len) + 1
        checks.integers("paged_kv_indptr_buffer", indptr, self.stream, on_host=False, size=size)
        self._buffers = (indptr, indices, last_page_len)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        self.calls["decode plan"] += 1
        self._check_pages(indptr, indices, last_page_len, page_size)
        checks.heads(num_qo_heads, num_kv_heads, head_dim, page_size, self.rules)
        group = num_qo_heads // num_kv_heads
        assert self._use_tensor_cores or group in (1, 2, 3, 4, 6, 8, 16), f"no kernel without tensor cores for {group}"
        checks.dtypes(q_data_type, kv_data_type, self.rules)
        checks.scores(window_left, logits_soft_cap, sm_scale)
        checks.defaults(
            pos_encoding_mode=(pos_encoding_mode, "NONE"),
            o_data_type=(o_data_type, None),
            data_type=(data_type, None),
            rope_scale=(rope_scale, None),
            rope_theta=(rope_theta, None),
            non_blocking=(non_blocking, True),
            block_tables=(block_tables, None),
            seq_lens=(seq_lens, None),
            fixed_split_size=(fixed_split_size, None),
            disable_split_kv=(disable_split_kv, False),
            q_len_per_req=(q_len_per_req, 1),
        )
        self._copied(indptr, last_page_len)
        if self._buffers is not None:
            rows = len(last_page_len)
            self._check_workspace(rows, rows, num_qo_heads, num_kv_heads, head_dim)
        self._plan = _Plan(
            list(range(len(last_page_len) + 1)),
            indptr.tolist(),
            last_page_len.tolist(),
            self._keep(indptr, indices, last_page_len),
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            (q_data_type, kv_data_type),  # type: ignore[arg-type]
            Scores(window_left, logits_soft_cap or 0.0, sm_scale or 0.0),
        )

    def _keep(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor) -> torch.Tensor:
        """Writes the fixed buffers, where there are such; gives where runs find the page numbers."""
        if self._buffers is None:
            return indices
        kept_indptr, kept_indices, kept_last = self._buffers
        assert len(last_page_len) == len(kept_last), f"a batch of {len(last_page_len)} in buffers for {len(kept_last)}"
        assert len(indices) <= len(kept_indices), f"{len(indices)} pages in a buffer for {len(kept_indices)}"
        kept_indptr.copy_(indptr)
        kept_last.copy_(last_page_len)
        kept_indices[: len(indices)] = indices
        return kept_indices[: len(indices)]

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Any:
        self.calls["decode run"] += 1
        assert not args
        unknown = {
            "q_scale": q_scale,
            "out": out,
            "lse": lse,
            "enable_pdl": enable_pdl,
            "window_left": window_left,
            "sinks": sinks,
            "q_len_per_req": q_len_per_req,
            "skip_softmax_threshold_scale_factor": skip_softmax_threshold_scale_factor,
            "kv_cache_sf": kv_cache_sf,
        }
        if self.stream.recorder is not None:
            assert self._buffers is not None, "a graph would read the tables of another step"
        return self.stream.launch(lambda: self._decode(q, paged_kv_cache, k_scale, v_scale, unknown, return_lse))

    def _decode(
        self, q: torch.Tensor, kv: Any, k_scale: Any, v_scale: Any, unknown: dict[str, Any], return_lse: bool
    ) -> Any:
        plan = self._check_run(q, kv, k_scale, v_scale, unknown)
        if self._buffers is not None:
            indptr, _, last_page_len = self._buffers
            planned = (plan.page_offsets, plan.last_page_len)
            assert planned == (indptr.tolist(), last_page_len.tolist()), "the buffers hold a step that was not planned"
        return self._attend(q, kv, k_scale, v_scale, plan, return_lse)
