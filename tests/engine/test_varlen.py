"""Attention to all rows at once by torch, whose kernel for CUDA is stood in for: the rest of torch's way is its own."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.attention import LayerAttention
from engine.attention.torch_paged import TorchPagedAttention
from engine.attention.varlen import find_varlen, varlen_of_torch
from tests.support import flashinfer_standin
from tests.support.flashinfer_standin import Standin
from tests.support.flashinfer_standin.attend import Scores, attend_row
from tests.support.flashinfer_standin.checks import floats, integers, offsets
from tests.support.paged_rig import PagedRig

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = (LayerAttention(), LayerAttention(window=5, scale=0.3), LayerAttention(softcap=2.0), LayerAttention(window=1))


class Kernel:
    """torch's _flash_attention_forward, of which the CPU has none. calls: (rows, longest row) of each."""

    def __init__(self, standin: Standin) -> None:
        self.stream = standin.stream
        self.calls: list[tuple[int, int]] = []

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        token_offsets: torch.Tensor,
        key_offsets: torch.Tensor,
        most_tokens: int,
        most_keys: int,
        dropout: float,
        causal: bool,
        mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, ...]:
        assert (dropout, mask, set(rest.values()) - {None}) == (0.0, False, set())
        assert q.dtype in (torch.float16, torch.bfloat16, torch.float32), "the last one for exact numbers alone"
        for name, numbers in (("cum_seq_q", token_offsets), ("cum_seq_k", key_offsets)):
            integers(name, numbers, self.stream, on_host=False)
            offsets(name, numbers)
        assert (most_tokens, most_keys) == (int(token_offsets.diff().max()), int(key_offsets.diff().max()))
        floats("q", q, (int(token_offsets[-1]), *q.shape[1:]), q.dtype, self.stream)
        for name, tensor in (("k", k), ("v", v)):
            floats(name, tensor, (int(key_offsets[-1]), *k.shape[1:]), q.dtype, self.stream)
        assert window_size_left is not None
        assert causal == (window_size_left < 0)
        assert window_size_right == 0, "a token would see later ones"
        assert scale is not None
        self.calls.append((len(token_offsets) - 1, most_tokens))
        options = Scores(window_size_left, 0.0, scale)
        counts, lengths = token_offsets.diff().tolist(), key_offsets.diff().tolist()
        rows = zip(q.float().split(counts), k.float().split(lengths), v.float().split(lengths), lengths, strict=True)
        attended = torch.cat([attend_row(*row, options)[0] for row in rows]).to(q.dtype)
        return attended, torch.zeros(q.shape[1], len(q)), torch.zeros(2), torch.zeros(0), torch.zeros(0)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    kernel = Kernel(flashinfer_standin.install(monkeypatch))
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", kernel, "CPU")
        yield kernel


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("group", [1, 3])
def test_all_rows_at_once(kernel: Kernel, page_size: int, group: int) -> None:
    """Beside attention spelled out: prompts, mixed steps, single tokens, forks, windows; soft caps go row by row."""
    varlen = varlen_of_torch()
    assert varlen is not None
    rig = PagedRig(
        [lambda kv: TorchPagedAttention(kv, LAYERS, varlen)],
        heads=2 * group,
        page_size=page_size,
        num_pages=400 // page_size,
        layers=LAYERS,
    )
    first, second = rig.add(90), rig.add(60)
    rig.start(first)
    rig.start(second)
    rig.step({first: 33, second: 1})
    rig.step({first: 1, second: 17})
    child = rig.fork(first)
    rig.step({first: 1, child: 1, second: 1})
    rig.step({child: 20})
    assert kernel.calls == [call for call in ((2, 33), (2, 17), (3, 1), (1, 20)) for _ in range(3)]


@pytest.mark.parametrize("change", [{"window_size": (-1, -1)}, {"window_size": (4, 0)}, {"scale": 0.5}])
def test_it_is_seen_where_it_is_told_something_else(kernel: Kernel, change: dict[str, Any]) -> None:
    varlen = varlen_of_torch()
    assert varlen is not None
    function = varlen._function
    varlen._function = lambda *arguments, **options: function(*arguments, **{**options, **change})
    rig = PagedRig([lambda kv: TorchPagedAttention(kv, None, varlen)], heads=2, page_size=4, layers=(LayerAttention(),))
    number = rig.add(20)
    rig.start(number)
    with pytest.raises(AssertionError):
        rig.step({number: 12})


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "capability", "built", "there"),
    [
        ("cuda", torch.bfloat16, 128, (8, 0), True, True),
        ("cuda", torch.float16, 80, (9, 0), True, True),
        ("cpu", torch.bfloat16, 128, (8, 0), True, False),
        ("cuda", torch.float32, 128, (8, 0), True, False),
        ("cuda", torch.bfloat16, 260, (8, 0), True, False),
        ("cuda", torch.bfloat16, 100, (8, 0), True, False),
        ("cuda", torch.float16, 128, (7, 5), True, False),
        ("cuda", torch.bfloat16, 128, (8, 0), False, False),
    ],
)
def test_where_torch_has_it(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int],
    built: bool,
    there: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    assert (find_varlen(torch.device(device), dtype, head_dim) is not None) == there


def test_an_older_torch_has_none_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("torch.nn.attention.varlen")
    monkeypatch.setitem(__import__("sys").modules, "torch.nn.attention.varlen", old)
    assert varlen_of_torch() is None
    old.varlen_attn = lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False: None  # type: ignore[attr-defined]
    assert varlen_of_torch() is None
