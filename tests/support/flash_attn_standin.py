"""flash-attn's varlen function for tests: checks every argument, and computes the same in torch, on the CPU."""

from __future__ import annotations

import sys
from collections import Counter
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.flashinfer_standin import Standin, checks
from tests.support.flashinfer_standin.attend import Scores, attend_row
from tests.support.flashinfer_standin.module import EXACT


class FlashAttnStandin(ModuleType):
    """calls: "paged" and "gathered", how often. Knows from FlashInfer's stand-in what is in host memory."""

    def __init__(self, standin: Standin) -> None:
        super().__init__("flash_attn")
        self.__spec__ = ModuleSpec("flash_attn", None)
        self.stream = standin.stream
        self.calls: Counter[str] = Counter()

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Signature and meaning as in flash-attn 2.8 (flash_attn/flash_attn_interface.py)."""
        checks.defaults(
            dropout_p=(dropout_p, 0.0),
            alibi_slopes=(alibi_slopes, None),
            deterministic=(deterministic, False),
            return_attn_probs=(return_attn_probs, False),
        )
        assert causal is True, "causal was left out"
        assert isinstance(softmax_scale, float)
        for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            checks.integers(name, offsets, self.stream, on_host=False, size=len(cu_seqlens_q))
            checks.offsets(name, offsets)
        assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
        assert q.dtype in EXACT
        checks.floats("q", q, (int(cu_seqlens_q[-1]), *q.shape[1:]), q.dtype, self.stream)
        for name, tensor in (("k", k), ("v", v)):
            checks.floats(name, tensor, tuple(k.shape), q.dtype, self.stream)
        rows = (
            self._gathered(k, v, cu_seqlens_k) if block_table is None else self._paged(k, v, cu_seqlens_k, block_table)
        )
        options = Scores(window_size[0], softcap, softmax_scale)
        queries = q.float().split(cu_seqlens_q.diff().tolist())
        lengths = cu_seqlens_k.diff().tolist()
        attended = [
            attend_row(one, keys.float(), values.float(), length, options)[0]
            for one, (keys, values), length in zip(queries, rows, lengths, strict=True)
        ]
        return torch.cat(attended).to(q.dtype)

    def _gathered(
        self, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        self.calls["gathered"] += 1
        assert k.dim() == 3
        assert len(k) == int(offsets[-1])
        lengths = offsets.diff().tolist()
        return list(zip(k.split(lengths), v.split(lengths), strict=True))

    def _paged(
        self, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, table: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Whole pages: what is behind the end of a sequence is multiplied by zero."""
        self.calls["paged"] += 1
        assert k.dim() == 4
        assert k.shape[1] % 256 == 0, f"pages of {k.shape[1]} tokens"
        assert table.shape[0] == len(offsets) - 1
        checks.integers("block_table", table.flatten(), self.stream, on_host=False)
        assert table.is_contiguous()
        checks.in_range("block_table", table, 0, len(k) - 1)
        counts = (-(-offsets.diff() // k.shape[1])).tolist()
        return [(k[row[:n]].flatten(0, 1), v[row[:n]].flatten(0, 1)) for row, n in zip(table, counts, strict=True)]


def install(monkeypatch: pytest.MonkeyPatch, standin: Standin) -> FlashAttnStandin:
    """From here on `import flash_attn` gives a stand-in, and our backend lets float32 through."""
    flash = FlashAttnStandin(standin)
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    monkeypatch.setattr("engine.attention.flash_attn.DTYPES", EXACT)
    return flash
