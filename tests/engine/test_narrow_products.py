"""Products of 8-bit weights as a card computes them: beside exact arithmetic, row by row, and what is refused."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from engine.kernels import Products
from engine.narrow import Fp8Linear, Int8Linear, RowScaled
from engine.narrow.linear import _MIDDLE, _split
from engine.quant import DenseLinear, Linear, load_linear
from tests.support import narrow_standin

E4M3 = torch.float8_e4m3fn
KINDS = {"int8": torch.int8, "fp8": E4M3}
ACTIVATIONS = {torch.int8: 127.0 * 256, E4M3: 448.0}
"""What the largest element of a row becomes."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return narrow_standin.install(monkeypatch)


@pytest.fixture(params=KINDS)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return KINDS[request.param]


def numbers(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """float32, rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-2, 1, rows)[:, None]
    return torch.randn((rows, columns), generator=generator) * sizes


def linear(weight: RowScaled, bias: torch.Tensor | None = None) -> Linear:
    tensors = {"x.weight": weight.q, "x.scale": weight.scale} | ({} if bias is None else {"x.bias": bias})
    return load_linear(tensors, "x", Products())


def on_the_grid(x: torch.Tensor, largest: float) -> torch.Tensor:
    """float64: x rounded to what its row can hold, by its own arithmetic. largest: 448 of 8-bit floats, else whole."""
    x = x.double()
    scale = x.abs().amax(-1, keepdim=True) / largest
    scaled = torch.where(scale > 0, x / scale, 0.0)
    step = torch.ones_like(scaled)
    if largest == 448:
        exponent = torch.frexp(scaled).exponent.clamp_min(-5) - 1  # subnormals are below 2^-6
        step = torch.ldexp(step, exponent - 3)  # 3 bits behind the point
    return (scaled / step).round() * step * scale


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 64])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_beside_exact_arithmetic(
    calls: Counter[str], dtype: torch.dtype, given: torch.dtype, rows: int, biased: bool
) -> None:
    """Of what both operands are rounded to; how a result is rounded follows."""
    weight, bias = RowScaled.of(numbers(48, 64), dtype), numbers(1, 48, seed=1)[0] if biased else None
    x = numbers(64, 64, seed=2)[-rows:].to(given)
    y = linear(weight, bias)(x)
    assert (y.dtype, y.shape, sum(calls.values())) == (given, (rows, 48), 1)
    rounded, w = on_the_grid(x, ACTIVATIONS[dtype]), weight.q.double() * weight.scale.double()[:, None]
    exact, size = F.linear(rounded, w), F.linear(rounded.abs(), w.abs())
    if bias is not None:
        exact, size = exact + bias, size + bias.abs()
    # A number between two of the grid may fall on either, where the quotient was rounded before.
    tolerance = 2 * torch.finfo(given).eps + (2e-3 if dtype == E4M3 else 2e-5)
    assert float(((y - exact).abs() / size).max()) < tolerance


def test_a_row_is_the_same_alone_and_in_company(calls: Counter[str], dtype: torch.dtype) -> None:
    layer = linear(RowScaled.of(numbers(64, 96), dtype), numbers(1, 64, seed=1)[0])
    x = numbers(64, 96, seed=2).to(torch.bfloat16)
    together = layer(x)
    for row in range(64):
        assert torch.equal(layer(x[row : row + 1])[0], together[row])
        assert torch.equal(layer(x[: row + 1])[row], together[row])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(calls: Counter[str], dtype: torch.dtype, value: float) -> None:
    layer = linear(RowScaled.of(numbers(64, 96), dtype))
    x = torch.ones((5, 96), dtype=torch.bfloat16)
    before = layer(x)
    x[3, 7] = value
    after = layer(x)
    assert not bool(after[3].isfinite().any())
    assert torch.equal(after[[0, 1, 2, 4]], before[[0, 1, 2, 4]])


def test_rows_of_zeros_and_no_rows(calls: Counter[str], dtype: torch.dtype) -> None:
    weight = numbers(32, 64)
    weight[5] = 0
    layer = linear(RowScaled.of(weight, dtype), torch.full((32,), 3.0))
    assert torch.equal(layer(torch.zeros((2, 64))), torch.full((2, 32), 3.0))
    assert torch.equal(layer(torch.ones((2, 64)))[:, 5], torch.full((2,), 3.0))
    assert layer(torch.zeros((0, 64), dtype=torch.bfloat16)).shape == (0, 32)
    assert sum(calls.values()) == 2


def test_rounding_of_weights(dtype: torch.dtype) -> None:
    weight = numbers(48, 64)
    scaled = RowScaled.of(weight, dtype)
    assert (scaled.q.dtype, scaled.scale.dtype, scaled.scale.shape) == (dtype, torch.float32, (48,))
    largest = 127 if dtype == torch.int8 else 448
    assert bool((scaled.q.float().abs().amax(-1) == largest).all())
    torch.testing.assert_close(scaled.dequantize(), on_the_grid(weight, largest).float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(dtype: torch.dtype, value: float) -> None:
    weight = torch.ones((16, 16))
    weight[3, 3] = value
    with pytest.raises(ValueError, match="not finite"):
        RowScaled.of(weight, dtype)


@pytest.mark.parametrize(
    ("outputs", "inputs", "fits"),
    [(16, 16, True), (4096, 14336, True), (24, 16, False), (16, 40, False), (0, 16, False)],
)
def test_sizes(outputs: int, inputs: int, fits: bool) -> None:
    assert RowScaled.fits(outputs, inputs) == fits


def test_activations_are_two_numbers_of_eight_bits() -> None:
    """All that there are, and halves between them, which go to the even one; both ends included."""
    x = torch.arange(-2 * 32512, 2 * 32512 + 1, dtype=torch.float32)[None] / 2
    high, low = (torch.empty(x.shape, dtype=torch.int8) for _ in range(2))
    _split(x, torch.tensor([[32512.0]]), torch.tensor([_MIDDLE]), high, low)
    assert torch.equal(256 * high.int() + low, x.round().int())
    assert (int(high.min()), int(high.max()), int(low.min()), int(low.max())) == (-127, 127, -128, 127)


def test_what_is_there_tells_the_layer() -> None:
    q, scale = torch.ones((16, 16)), torch.ones(16)
    assert isinstance(linear(RowScaled(q.to(torch.int8), scale)), Int8Linear)
    assert isinstance(linear(RowScaled(q.to(E4M3), scale)), Fp8Linear)
    assert isinstance(load_linear({"x.weight": q}, "x", Products()), DenseLinear)


def test_the_sums_of_torch_itself(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's kernels of the same names: what is passed to them is what they take."""
    layer, x = linear(RowScaled.of(numbers(48, 64), dtype)), numbers(20, 64, seed=2).to(torch.bfloat16)
    own = layer(x)
    narrow_standin.install(monkeypatch)
    torch.testing.assert_close(own, layer(x), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        (torch.ones((16, 32), dtype=torch.int8), torch.ones((32, 32), dtype=torch.int8).t(), "greater than 16"),
        (torch.ones((32, 32), dtype=torch.int8), torch.ones((32, 16), dtype=torch.int8), "column-major"),
        (torch.ones((32, 64), dtype=torch.int8)[:, ::2], torch.ones((16, 32), dtype=torch.int8).t(), "row-major"),
        (torch.ones((33, 32), dtype=torch.int8), torch.ones((16, 32), dtype=torch.int8).t(), "tiles"),
    ],
)
def test_the_stand_in_refuses_what_a_card_would(
    calls: Counter[str], a: torch.Tensor, b: torch.Tensor, told: str
) -> None:
    with pytest.raises(AssertionError, match=told):
        torch._int_mm(a, b)


@pytest.mark.parametrize(
    ("scale", "recipe", "output"),
    [
        (torch.ones((32, 1)), F.ScalingType.RowWise, torch.float32),
        (torch.ones(1, dtype=torch.bfloat16), F.ScalingType.TensorWise, torch.float32),
        (torch.ones(1), F.ScalingType.TensorWise, torch.float16),
    ],
)
def test_the_stand_in_wants_one_scale_and_gives_float32(
    calls: Counter[str], scale: torch.Tensor, recipe: F.ScalingType, output: torch.dtype
) -> None:
    a, b, one = torch.ones((32, 32)).to(E4M3), torch.ones((16, 32)).to(E4M3).t(), torch.ones(1)
    given = F.scaled_mm(a, b, one, F.ScalingType.TensorWise, one, F.ScalingType.TensorWise, output_dtype=torch.float32)
    assert torch.equal(given, torch.full((32, 16), 32.0))
    with pytest.raises(AssertionError):
        F.scaled_mm(a, b, scale, recipe, one, F.ScalingType.TensorWise, output_dtype=output)
