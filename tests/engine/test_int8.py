"""8-bit weights with activations of 16 bits and of 8: how exact they are, and every row for itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.quant import Int8Linear, Linear, SmoothedInt8Linear
from engine.quant.int8 import MOST_JOINED_ROWS, quantize_rows, smoothing_of

COUNTS = [1, 2, 9, MOST_JOINED_ROWS, MOST_JOINED_ROWS + 1, 70]
STEP = 1 / (127 if torch.cpu._is_vnni_supported() else 63)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def wide(weight: torch.Tensor) -> Linear:
    return Int8Linear(*quantize_rows(weight))


def narrow(weight: torch.Tensor) -> Linear:
    smoothing = torch.rand(weight.shape[1], generator=seeded(9)) + 0.5
    return SmoothedInt8Linear(*quantize_rows(weight * smoothing), smoothing)


@pytest.mark.parametrize("columns", [7, 64, 576])
@pytest.mark.parametrize("count", [6, MOST_JOINED_ROWS + 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_rounded_weights(columns: int, count: int, dtype: torch.dtype) -> None:
    weight, scale = quantize_rows(torch.randn((50, columns), generator=seeded(columns)))
    bias = torch.randn(50, generator=seeded(1))
    x = torch.randn((count, columns), generator=seeded(2))
    x[0] *= 1000  # one large row must not coarsen the others
    x[1, 0] = 100.0
    x[2] = 0.0
    x = x.to(dtype)
    expected = x.double() @ (weight.double() * scale.double()[:, None]).t() + bias.double()
    got = Int8Linear(weight, scale, bias)(x)
    assert got.dtype == torch.float32
    bound = 1e-4 if dtype == torch.float32 else 5e-3
    assert bool(
        ((got.double() - expected).abs().amax(-1) <= bound * (x.double().abs().amax(-1) * columns**0.5 + 4)).all()
    )


@pytest.mark.parametrize("columns", [7, 64, 576])
def test_narrow_rows_are_off_by_half_a_step_of_their_peak_at_most(columns: int) -> None:
    smoothing = torch.rand(columns, generator=seeded(3)) + 0.5
    weight, scale = quantize_rows(torch.randn((50, columns), generator=seeded(columns)))
    bias = torch.randn(50, generator=seeded(1))
    x = torch.randn((6, columns), generator=seeded(2))
    x[0] *= 1000
    x[1, 0] = 3000.0  # a massive activation coarsens its own row alone
    x[2] = 0.0
    exact = weight.double() * scale.double()[:, None]
    smoothed = x.double() / smoothing.double()
    error = (
        SmoothedInt8Linear(weight, scale, smoothing, bias)(x).double() - smoothed @ exact.t() - bias.double()
    ).abs()
    # Each element is off by half a step at most, and float32 by its own.
    bound = 0.5 * STEP * smoothed.abs().amax(-1, keepdim=True) * exact.abs().sum(-1) * 1.001 + 1e-5
    assert bool((error <= bound).all())
    assert torch.equal(SmoothedInt8Linear(weight, scale, smoothing)(x)[2], torch.zeros(50))


@pytest.mark.parametrize("make", [wide, narrow])
@pytest.mark.parametrize("columns", [96, 1536])
@pytest.mark.parametrize("count", COUNTS)
def test_no_row_depends_on_the_others(make: Callable[[torch.Tensor], Linear], columns: int, count: int) -> None:
    linear = make(torch.randn((40, columns), generator=seeded(0)))
    x = torch.randn((count, columns), generator=seeded(1)) * torch.logspace(-3, 3, count)[:, None]
    x[::3, 5] = 3000.0
    together = linear(x)
    for i in range(count):
        assert torch.equal(linear(x[i : i + 1])[0], together[i])


def test_smoothing_changes_no_product_but_evens_the_channels_out() -> None:
    weight, x = torch.randn((40, 96), generator=seeded(0)), torch.randn((30, 96), generator=seeded(1))
    x[:, 5] *= 100
    peaks = x.abs().amax(0)
    smoothing = smoothing_of(peaks, weight)
    assert float(smoothing.log().mean()) == pytest.approx(0, abs=1e-5)
    exact = x.double() @ weight.double().t()
    torch.testing.assert_close(
        (x.double() / smoothing.double()) @ (weight.double() * smoothing.double()).t(), exact, rtol=1e-9, atol=1e-9
    )
    plain, smoothed = (
        SmoothedInt8Linear(*quantize_rows(weight * each), each)(x).double() for each in (torch.ones(96), smoothing)
    )
    assert float((smoothed - exact).norm()) < 0.5 * float((plain - exact).norm())


@pytest.mark.parametrize("peaks", [torch.zeros(8), torch.tensor([0.0] * 7 + [5.0]), torch.full((8,), float("inf"))])
def test_any_peaks_give_a_usable_smoothing(peaks: torch.Tensor) -> None:
    weight = torch.randn((4, 8), generator=seeded(0))
    weight[:, 3] = 0
    for each in (weight, torch.zeros(4, 8)):
        smoothing = smoothing_of(peaks, each)
        assert bool((smoothing.isfinite() & (smoothing > 0)).all())
