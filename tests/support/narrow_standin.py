"""CUDA's products of 8 bits for tests on the CPU: every argument is checked as a card would, and sums are exact.

Limits as in torch 2.13 (ATen/native/cuda/Blas.cpp: _int_mm; ScaledBlas.cpp: scales of whole operands, by cuBLASLt).
Stricter where a card would be slow: rows fill tiles of 16, and the second operand is read along its columns.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F

E4M3 = torch.float8_e4m3fn


def install(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """From now on in place of torch's; counts the calls by name."""
    calls: Counter[str] = Counter()

    def int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls["int8"] += 1
        _check(a, b, torch.int8, 8)
        assert len(a) > 16, "torch._int_mm: self.size(0) needs to be greater than 16"
        return (a.double() @ b.double()).int()

    def scaled_mm(
        a: torch.Tensor, b: torch.Tensor, scale_a: Any, recipe_a: Any, scale_b: Any, recipe_b: Any, **options: Any
    ) -> torch.Tensor:
        calls["fp8"] += 1
        _check(a, b, E4M3, 16)
        assert recipe_a is recipe_b is F.ScalingType.TensorWise
        for scale in (scale_a, scale_b):
            assert (scale.dtype, scale.numel()) == (torch.float32, 1)
        assert options == {"output_dtype": torch.float32}
        return (a.double() @ b.double() * scale_a * scale_b).float()

    monkeypatch.setattr(torch, "_int_mm", int_mm)
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    return calls


def _check(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, multiple: int) -> None:
    assert a.dtype == b.dtype == dtype
    assert a.dim() == b.dim() == 2
    assert a.shape[1] == b.shape[0]
    assert len(a) > 0
    assert len(a) % 16 == 0, "tiles"
    assert a.is_contiguous(), "row-major"
    assert b.t().is_contiguous(), "column-major"
    assert all(size % multiple == 0 for size in b.shape)
    assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
