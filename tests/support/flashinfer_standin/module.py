"""The module that tests put in FlashInfer's place."""

from __future__ import annotations

import sys
from collections import Counter
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from weakref import WeakValueDictionary

import pytest
import torch

from tests.support.flashinfer_standin import checks
from tests.support.flashinfer_standin.checks import Rules
from tests.support.flashinfer_standin.stream import StandinTransfers, Stream
from tests.support.flashinfer_standin.wrappers import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
)

EXACT = (torch.float32, torch.float16, torch.bfloat16)
SMALL = tuple(range(8, 257, 8))
RULES = Rules((torch.float16, torch.bfloat16), (64, 128, 256))
EXACT_RULES = Rules(EXACT, SMALL)


class Standin(ModuleType):
    """calls: how often what was called: "prefill plan", "decode run", "append", ...; "shared plan" is one of a
    prefill wrapper whose queries see all keys. workspaces: those still in use."""

    def __init__(self, rules: Rules = RULES) -> None:
        super().__init__("flashinfer")
        self.__spec__ = ModuleSpec("flashinfer", None)
        self.stream = Stream()
        self.transfers = StandinTransfers(self.stream)
        self.calls: Counter[str] = Counter()
        self.rules = rules
        self.workspaces: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
        own = {"stream": self.stream, "rules": rules, "calls": self.calls, "workspaces": self.workspaces}
        for wrapper in (BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper):
            setattr(self, wrapper.__name__, type(wrapper.__name__, (wrapper,), dict(own)))

    def append_paged_kv_cache(
        self,
        append_key: torch.Tensor,
        append_value: torch.Tensor,
        batch_indices: torch.Tensor,
        positions: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_indices: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_last_page_len: torch.Tensor,
        kv_layout: str = "NHD",
    ) -> None:
        """Nobody may write into a page that another row reads, but for the last page of all, which is nobody's."""
        self.calls["append"] += 1
        assert isinstance(paged_kv_cache, torch.Tensor), "the stand-in wants K and V in one tensor"
        assert kv_layout == "NHD", f"the stand-in does not know kv_layout={kv_layout!r}"
        tables = (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
        self.stream.launch(lambda: _append(self.stream, append_key, append_value, paged_kv_cache, *tables))

    def can_implement_filtered_topk(self) -> bool:
        return True

    def top_k(
        self,
        input: torch.Tensor,
        k: int,
        sorted: bool = False,
        deterministic: bool = False,
        tie_break: int = 0,
        dsa_graph_safe: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In an order that nobody should count on."""
        self.calls["top_k"] += 1
        checks.defaults(sorted=(sorted, False), dsa_graph_safe=(dsa_graph_safe, False))
        checks.floats("input", input, tuple(input.shape), torch.float32, self.stream)
        assert input.dim() == 2
        assert input.is_contiguous()
        assert len(input) > 0, "a launch of no rows"
        assert 0 < k < input.shape[1]
        assert k <= 2048, "the selection that tells equal values apart has at most 2,048"
        assert deterministic
        assert tie_break == 1, "among equal values, any would be taken"
        values, ids = input.sort(dim=-1, descending=True, stable=True)
        shuffled = torch.arange(k).flip(0).roll(k // 3)
        return values[:, shuffled], ids[:, shuffled]

    def merge_state_in_place(
        self,
        v: torch.Tensor,
        s: torch.Tensor,
        v_other: torch.Tensor,
        s_other: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> None:
        """A block of threads has all heads of a token, eight elements a thread."""
        self.calls["merge"] += 1
        checks.defaults(mask=(mask, None))
        assert v.dtype in self.rules.dtypes, f"no kernels for {v.dtype}"
        for name, tensor in (("v", v), ("v_other", v_other)):
            checks.floats(name, tensor, tuple(v.shape), v.dtype, self.stream)
            assert tensor.is_contiguous(), f"{name} is not contiguous"
        for name, tensor in (("s", s), ("s_other", s_other)):
            checks.floats(name, tensor, tuple(v.shape[:2]), torch.float32, self.stream)
            assert tensor.is_contiguous(), f"{name} is not contiguous"
        assert v.shape[1] * v.shape[2] // 8 <= 1024, f"{v.shape[1]} heads of {v.shape[2]} elements in one block"
        self.stream.launch(lambda: _merge(v, s, v_other, s_other))

    def rmsnorm(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        out: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor:
        self.calls["rmsnorm"] += 1
        checks.defaults(out=(out, None), enable_pdl=(enable_pdl, None))
        assert input.dim() in (2, 3)
        assert input.dtype in self.rules.dtypes, f"no kernels for {input.dtype}"
        checks.floats("input", input, tuple(input.shape), input.dtype, self.stream)
        checks.floats("weight", weight, (input.shape[-1],), input.dtype, self.stream)
        return self.stream.launch(lambda: _rmsnorm(input, weight, eps))

    def silu_and_mul(
        self, input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
    ) -> torch.Tensor:
        self.calls["silu_and_mul"] += 1
        checks.defaults(out=(out, None), enable_pdl=(enable_pdl, None))
        assert input.dtype in self.rules.dtypes, f"no kernels for {input.dtype}"
        assert input.is_contiguous()
        assert input.shape[-1] // 2 * input.dtype.itemsize % 16 == 0, "the up half begins at an odd address"
        checks.floats("input", input, tuple(input.shape), input.dtype, self.stream)
        return self.stream.launch(lambda: _silu_and_mul(input))

    def apply_rope_with_cos_sin_cache_inplace(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        head_size: int,
        cos_sin_cache: torch.Tensor,
        is_neox: bool = True,
    ) -> None:
        self.calls["rope"] += 1
        assert is_neox is False, "our pairs are adjacent"
        assert head_size in self.rules.head_dims, f"no kernels for heads of {head_size}"
        assert query.dtype == key.dtype
        assert query.dtype in self.rules.dtypes, f"no kernels for {query.dtype}"
        checks.floats("query", query, (len(positions), query.shape[1]), query.dtype, self.stream)
        checks.floats("key", key, (len(positions), key.shape[1]), key.dtype, self.stream)
        assert positions.dtype in (torch.int32, torch.int64)
        assert cos_sin_cache.is_contiguous()
        checks.floats("cos_sin_cache", cos_sin_cache, (len(cos_sin_cache), head_size), torch.float32, self.stream)
        self.stream.launch(lambda: _rope(positions, (query, key), head_size, cos_sin_cache))


def _append(
    stream: Stream,
    key: torch.Tensor,
    value: torch.Tensor,
    kv: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    count, (_, _, page_size, heads, head_dim) = len(key), kv.shape
    checks.floats("kv", kv, (len(kv), 2, page_size, heads, head_dim), kv.dtype, stream)
    checks.floats("append_key", key, (count, heads, head_dim), kv.dtype, stream)
    checks.floats("append_value", value, (count, heads, head_dim), kv.dtype, stream)
    checks.integers("batch_indices", batch_indices, stream, on_host=False, size=count)
    checks.integers("positions", positions, stream, on_host=False, size=count)
    checks.integers("kv_last_page_len", kv_last_page_len, stream, on_host=False)
    checks.in_range("kv_last_page_len", kv_last_page_len, 1, page_size)
    rows = len(kv_last_page_len)
    checks.integers("kv_indptr", kv_indptr, stream, on_host=False, size=rows + 1)
    checks.offsets("kv_indptr", kv_indptr)
    checks.integers("kv_indices", kv_indices, stream, on_host=False)
    assert len(kv_indices) >= int(kv_indptr[-1]), "kv_indices is too short"
    checks.in_range("kv_indices", kv_indices[: int(kv_indptr[-1])], 0, len(kv) - 1)
    checks.in_range("batch_indices", batch_indices, 0, rows - 1)
    lengths = (kv_indptr.diff() - 1) * page_size + kv_last_page_len
    assert int(positions.min()) >= 0, "a position below zero"
    assert bool((positions < lengths[batch_indices]).all()), "a position behind the end of its sequence"
    pages = kv_indices[kv_indptr[batch_indices] + positions // page_size]
    _check_writers(batch_indices, positions, pages, kv_indices, kv_indptr, nobodys=len(kv) - 1)
    stream.written[kv.data_ptr()] = set(pages.tolist()) - {len(kv) - 1}
    kv[pages, 0, positions % page_size] = key
    kv[pages, 1, positions % page_size] = value


def _merge(v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor) -> None:
    largest = torch.maximum(s, s_other)
    own, other = torch.exp2(s - largest), torch.exp2(s_other - largest)
    merged = (own[..., None] * v.float() + other[..., None] * v_other.float()) / (own + other)[..., None]
    v.copy_(merged)
    s.copy_(torch.log2(own + other) + largest)


def _rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def _rope(positions: torch.Tensor, tensors: tuple[torch.Tensor, ...], size: int, table: torch.Tensor) -> None:
    checks.in_range("positions", positions, 0, len(table) - 1)
    cos, sin = table[positions][:, None].chunk(2, dim=-1)
    for tensor in tensors:
        heads = tensor.view(len(tensor), -1, size)
        a, b = heads[..., ::2].float(), heads[..., 1::2].float()
        heads[..., ::2], heads[..., 1::2] = a * cos - b * sin, b * cos + a * sin


def _check_writers(
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    nobodys: int,
) -> None:
    tokens = list(zip(batch_indices.tolist(), positions.tolist(), pages.tolist(), strict=True))
    tables = [set(kv_indices[a:b].tolist()) for a, b in pairwise(kv_indptr.tolist())]
    readers = Counter(page for table in tables for page in table)
    for row, _, page in tokens:
        assert page == nobodys or readers[page] == 1, f"row {row} writes into page {page}, which another row reads"
    own = [token for token in tokens if token[2] != nobodys]
    assert len(set(own)) == len(own), "two tokens are written into one place"


def install(monkeypatch: pytest.MonkeyPatch, *, exact: bool = True) -> Standin:
    """From here on `import flashinfer` gives a stand-in. exact: it and our backend let float32 and small heads through,
    which no card has kernels for, so that numbers can be compared one by one."""
    standin = Standin(EXACT_RULES if exact else RULES)
    for name in ("flashinfer", "flashinfer.topk"):
        monkeypatch.setitem(sys.modules, name, standin)
    users = ("attention.flashinfer", "attention.flash_attn", "attention.torch_paged", "link", "adapters.batch")
    for module in users:
        monkeypatch.setattr(f"engine.{module}.transfers_for", lambda device: standin.transfers)
    monkeypatch.setattr("engine.attention.workspace._LEAST", 0)
    if exact:
        monkeypatch.setattr("engine.attention.flashinfer.DTYPES", EXACT)
        monkeypatch.setattr("engine.attention.flashinfer.HEAD_DIMS", SMALL)
    return standin
