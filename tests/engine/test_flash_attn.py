"""flash-attn's backend for prompts on a stand-in, beside torch's over the same pages, and FlashInfer's for decoding."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from engine.attention import KVShape
from engine.attention.flash_attn import FlashAttnAttention, unsupported
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.paged_kv import PagedKV
from engine.attention.torch_paged import TorchPagedAttention
from engine.errors import AttentionUnavailable
from tests.support import flash_attn_standin, flashinfer_standin
from tests.support.flash_attn_standin import FlashAttnStandin
from tests.support.flashinfer_standin import Standin
from tests.support.paged_rig import CPU, LAYERS, PagedRig

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Standin:
    return flashinfer_standin.install(monkeypatch)


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch, flashinfer: Standin) -> FlashAttnStandin:
    return flash_attn_standin.install(monkeypatch, flashinfer)


def rig_of(heads: int, **options: Any) -> PagedRig:
    def flash(kv: PagedKV) -> FlashAttnAttention:
        return FlashAttnAttention(kv, LAYERS, FlashInferAttention(kv, LAYERS, heads))

    return PagedRig((flash, lambda kv: TorchPagedAttention(kv, LAYERS)), heads=heads, **options)


@pytest.mark.parametrize(("page_size", "way"), [(1, "gathered"), (16, "gathered"), (256, "paged")])
@pytest.mark.parametrize("group", [1, 3])
def test_prompts_here_and_tokens_there(
    flashinfer: Standin, flash_attn: FlashAttnStandin, page_size: int, way: str, group: int
) -> None:
    rig = rig_of(2 * group, page_size=page_size, num_pages=800 // page_size + 6)
    first, second = rig.add(330), rig.add(90)
    rig.start(first)
    rig.start(second)
    rig.step({first: 250, second: 20})
    rig.step({first: 1, second: 1})
    child = rig.fork(first)
    rig.step({first: 20, child: 3, second: 1})
    rig.step({child: 1})
    assert flash_attn.calls == {way: 2 * len(LAYERS)}
    assert flashinfer.calls["decode run"] == 2 * len(LAYERS)
    assert flashinfer.calls["prefill plan"] == 0


def test_a_page_that_another_left_full_of_nan(flash_attn: FlashAttnStandin) -> None:
    rig = rig_of(6, page_size=256, num_pages=2)
    broken = rig.add(300)
    rig.start(broken)
    rig.step({broken: 290}, bad=broken)
    rig.drop(broken)
    later = rig.add(300)
    rig.start(later)
    rig.step({later: 270})
    rig.step({later: 1})


def test_what_flash_attn_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(dtype: torch.dtype, head_dim: int = 64) -> FlashAttnAttention:
        kv = PagedKV(KVShape(1, 2, head_dim, 4, 4, dtype), CPU)
        return FlashAttnAttention(kv, None, TorchPagedAttention(kv))

    with pytest.raises(AttentionUnavailable, match=r"float32, only for torch\.float16, torch\.bfloat16"):
        backend(torch.float32)
    with pytest.raises(AttentionUnavailable, match="multiples of 8, not 264"):
        backend(torch.bfloat16, head_dim=264)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(AttentionUnavailable, match="cannot be loaded"):
        backend(torch.bfloat16)
    assert unsupported(80, torch.bfloat16) is None
