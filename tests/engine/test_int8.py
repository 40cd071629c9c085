"""8-bit weights with activations of 16 bits: nearly exact, and every row for itself."""

from __future__ import annotations

import pytest
import torch

from engine.quant.int8 import Int8Linear, quantize_rows


@pytest.mark.parametrize("columns", [7, 64, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_rounded_weights(columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(columns)
    weight, scale = quantize_rows(torch.randn((50, columns), generator=generator))
    x = torch.randn((6, columns), generator=generator)
    x[0] *= 1000  # one large row must not coarsen the others
    x[1, 0] = 100.0
    x[2] = 0.0
    x = x.to(dtype)
    expected = x.double() @ (weight.double() * scale.double()[:, None]).t()
    got = Int8Linear(weight, scale)(x)
    assert got.dtype == dtype
    bound = 1e-4 if dtype == torch.float32 else 5e-3
    assert bool(((got.double() - expected).abs().amax(-1) <= bound * x.double().abs().amax(-1) * columns**0.5).all())


def test_no_row_depends_on_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    linear = Int8Linear(*quantize_rows(torch.randn((40, 96), generator=generator)))
    x = torch.randn((9, 96), generator=generator) * torch.logspace(-3, 3, 9)[:, None]
    together = linear(x)
    for i in range(9):
        assert torch.equal(linear(x[i : i + 1])[0], together[i])
