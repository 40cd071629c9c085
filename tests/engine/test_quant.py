"""Weights in groups of 32, and products with rounded activations: how exact they are, and every row for itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.kernels import Norm, Products
from engine.quant import GroupedWeight, PackedLinear
from engine.quant.grouped import Bits
from tests.support.packed import unpacked

pytestmark = pytest.mark.usefixtures("one_thread")

INPUTS = 96
BITS: list[Bits] = [4, 8]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_weight(rows: int, columns: int = INPUTS, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, columns), generator=seeded(seed)) * torch.logspace(-2, 1, rows)[:, None]


def random_rows(count: int, columns: int = INPUTS, seed: int = 1) -> torch.Tensor:
    """Of very different sizes, some with a massive element."""
    x = torch.randn((count, columns), generator=seeded(seed)) * torch.logspace(-3, 3, count)[:, None]
    x[::3, 5] *= 300
    return x


# Weights.


@pytest.mark.parametrize("bits", BITS)
def test_a_weight_is_off_by_half_a_step_at_most(bits: Bits) -> None:
    weight = random_weight(50)
    grouped = weight.view(50, -1, 32)
    step = (grouped.amax(-1) - grouped.amin(-1)) / (2**bits - 1)
    rounding = 2.0**-11 * grouped.amin(-1).abs() + 2.0**-11 * step * (2**bits - 1)  # of scale and least, to float16
    error = (GroupedWeight.of(weight, bits).dequantize() - weight).abs().view(50, -1, 32)
    assert bool((error <= (0.5 * step + rounding)[..., None] * 1.001).all())


@pytest.mark.parametrize("bits", BITS)
def test_what_lies_on_the_steps_is_kept_exactly(bits: Bits) -> None:
    random = seeded(2)
    u = torch.randint(0, 2**bits, (37, INPUTS), generator=random, dtype=torch.uint8)
    u.view(37, -1, 32)[..., 0] = 0
    u.view(37, -1, 32)[..., 31] = 2**bits - 1
    scale = 2.0 ** torch.randint(-8, 2, (37, 3), generator=random).half()
    least = torch.randint(-200, 200, (37, 3), generator=random).half()
    weight = GroupedWeight(bits, u, scale, least)
    again = GroupedWeight.of(weight.dequantize(), bits)
    for name in ("u", "scale", "least"):
        assert torch.equal(getattr(again, name), getattr(weight, name))


@pytest.mark.parametrize("value", [0.0, 1.5, -3.0, 1e-7])
@pytest.mark.parametrize("bits", BITS)
def test_a_group_of_one_value(bits: Bits, value: float) -> None:
    weight = torch.full((3, 64), value)
    torch.testing.assert_close(GroupedWeight.of(weight, bits).dequantize(), weight, rtol=1e-3, atol=2.0**-25)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e6, -1e6])
@pytest.mark.parametrize("bits", BITS)
def test_a_weight_that_float16_cannot_hold_is_refused(bits: Bits, bad: float) -> None:
    weight = random_weight(4)
    weight[2, 40] = bad * 2**bits
    with pytest.raises(ValueError, match="not finite in 16 bits"):
        GroupedWeight.of(weight, bits)


@pytest.mark.parametrize(("kind", "size"), [("Q4_0", 18), ("Q4_1", 20)])
def test_four_bit_weights_of_gguf_files_are_kept_exactly(kind: str, size: int) -> None:
    from gguf import GGMLQuantizationType, quants

    from engine.weights.tensors import GgufTensors

    stored = quants.quantize(random_weight(20).numpy(), GGMLQuantizationType[kind])
    assert stored.shape == (20, INPUTS // 32 * size)

    class File:
        name, data, tensor_type, shape = "output.weight", stored, GGMLQuantizationType[kind], np.array([INPUTS, 20])
        tensors = ()

    file = File()
    file.tensors = (file,)
    source = GgufTensors(file, None)  # type: ignore[arg-type]
    grouped = source.grouped_4bit("lm_head.weight")
    assert grouped is not None
    assert torch.equal(grouped.dequantize(), source.dense("lm_head.weight"))


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("bits", BITS)
def test_a_packed_weight_holds_the_same_numbers(bits: Bits, rows: int) -> None:
    weight = GroupedWeight.of(random_weight(rows), bits)
    packed = weight.pack()
    assert packed.shape == (-(-rows // 16), INPUTS // 32, 16 * 32 * bits // 8 + 64)
    found = unpacked(packed, bits)
    for name in ("u", "scale", "least"):
        values = getattr(found, name)
        assert torch.equal(values[:rows], getattr(weight, name))
        assert not bool(values[rows:].any()), "outputs behind the last are zero"


@pytest.mark.parametrize("bits", BITS)
def test_weights_side_by_side(bits: Bits) -> None:
    parts = [GroupedWeight.of(random_weight(rows, seed=rows), bits) for rows in (3, 20, 9)]
    joined = GroupedWeight.cat(parts)
    assert joined.bits == bits
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_groups_are_of_32() -> None:
    assert [columns for columns in (0, 16, 32, 33, 48, 64) if GroupedWeight.fits(columns)] == [0, 32, 64]


# Products.


def linear_of(weight: GroupedWeight, bias: torch.Tensor | None = None) -> PackedLinear:
    return PackedLinear(Products(), weight.pack(), len(weight.u), bias)


def steps(x: torch.Tensor, bits: Bits) -> torch.Tensor:
    """How wide a step of the activations is, in float32: [rows, steps, 1]."""
    largest = x.float().view(len(x), -1, 16 if bits == 4 else 32).abs().amax(-1, keepdim=True)
    return largest.clamp_min(1e-30) * torch.tensor(1 / 127)


def rounded(x: torch.Tensor, bits: Bits) -> torch.Tensor:
    """Beside 4 bits to 8 bits with a step for 16, beside 8 bits to twice 8 with a step for 32; as float64."""
    step = steps(x, bits)
    scaled = x.float().view(len(x), -1, 16 if bits == 4 else 32) / step
    q = scaled.round().clamp(-127, 127)
    rest = ((scaled - q) * 254).round().clamp(-127, 127) if bits == 8 else torch.zeros(())
    return ((q.double() + rest.double() / 254) * step.double()).view(x.shape)


def error_bound(x: torch.Tensor, weight: GroupedWeight) -> torch.Tensor:
    """Of a product: each activation is off by half a step at most, or half a rest, and float32 by its own."""
    magnitudes, step = weight.dequantize().double().abs(), steps(x, weight.bits).double()
    half = (0.5 * step if weight.bits == 4 else 0.5 / 254 * step).expand(-1, -1, 16 if weight.bits == 4 else 32)
    return half.reshape(x.shape) @ magnitudes.t() * 1.01 + 1e-6 * (x.double().abs() @ magnitudes.t()) + 1e-6


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (40, INPUTS), (7, 576), (200, 1536)])
@pytest.mark.parametrize("count", [1, 3, 8, 21])
def test_a_product_is_that_of_rounded_activations(bits: Bits, rows: int, columns: int, count: int) -> None:
    weight = GroupedWeight.of(random_weight(rows, columns), bits)
    bias = torch.randn(rows, generator=seeded(3))
    x = random_rows(count, columns)
    x[-1, :32] = 0.0
    exact = rounded(x, bits) @ weight.dequantize().double().t()
    size = x.double().abs() @ weight.dequantize().double().abs().t()
    for added in (None, bias):
        found = linear_of(weight, added)(x)
        assert found.dtype == torch.float32
        wanted = exact if added is None else exact + bias.double()
        assert bool(((found.double() - wanted).abs() <= 3e-6 * size + 1e-6).all())


@pytest.mark.parametrize("bits", BITS)
def test_rows_of_other_types(bits: Bits) -> None:
    linear = linear_of(GroupedWeight.of(random_weight(40), bits))
    x = random_rows(6).bfloat16()
    assert torch.equal(linear(x), linear(x.float()))
    apart = torch.cat((x, x), 1)[:, :INPUTS]
    assert torch.equal(linear(apart), linear(x))
    assert linear(x[:0]).shape == (0, 40)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [48, 37])
@pytest.mark.parametrize("count", [1, 5, 30])
def test_what_is_done_before_and_after_a_product(bits: Bits, rows: int, count: int) -> None:
    weight = GroupedWeight.of(random_weight(rows), bits)
    dequantized = weight.dequantize().double().t()
    bias, residual = torch.randn(rows, generator=seeded(3)), torch.randn((count, rows), generator=seeded(4))
    norm = Norm(torch.rand(INPUTS, generator=seeded(5)) + 0.5, 1e-5)
    x = random_rows(count)
    x64 = x.double()
    normed = x64 / (x64.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    gate_up = torch.cat((random_rows(count, seed=6).clamp(-200, 200), x), 1)
    gated = torch.nn.functional.silu(gate_up[:, :INPUTS].double()) * x64
    for linear, added in ((linear_of(weight), 0.0), (linear_of(weight, bias), bias.double())):
        for given, options, exact in ((x, {}, x64), (x, {"norm": norm}, normed), (gate_up, {"gated": True}, gated)):
            wanted = exact @ dequantized + added
            bound = error_bound(exact.float(), weight)
            assert bool(((linear(given, **options).double() - wanted).abs() <= bound).all())
            into = residual.clone()
            found = linear(given, **options, add_to=into)
            assert found is into
            assert bool(((into.double() - wanted - residual.double()).abs() <= bound).all())


def test_what_is_gated_is_not_normed() -> None:
    linear = linear_of(GroupedWeight.of(random_weight(16), 4))
    with pytest.raises(ValueError, match="not both"):
        linear(random_rows(1, 2 * INPUTS), norm=Norm(torch.ones(INPUTS), 1e-5), gated=True)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("before", ["plain", "norm", "gated"])
def test_no_row_depends_on_the_others(bits: Bits, before: str) -> None:
    norm = Norm(torch.rand(INPUTS, generator=seeded(5)) + 0.5, 1e-5) if before == "norm" else None
    linear = linear_of(GroupedWeight.of(random_weight(80), bits), torch.randn(80, generator=seeded(3)))
    x = random_rows(300, INPUTS * (2 if before == "gated" else 1))
    alone = torch.cat([linear(x[i : i + 1], norm=norm, gated=before == "gated") for i in range(300)])
    for count in (*range(1, 41), 255, 256, 257, 300):
        assert torch.equal(linear(x[:count], norm=norm, gated=before == "gated"), alone[:count])
        assert torch.equal(linear(x[-count:], norm=norm, gated=before == "gated"), alone[-count:])
    into = torch.ones(300, 80)
    assert torch.equal(linear(x, norm=norm, gated=before == "gated", add_to=into), alone + 1)


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("count", [1, 4, 270])
def test_the_number_of_threads_changes_no_bit(count: int, threads: int) -> None:
    linear = linear_of(GroupedWeight.of(random_weight(208), 4))
    x, norm = random_rows(count), Norm(torch.ones(INPUTS), 1e-5)
    alone = linear(x), linear(x, norm=norm)
    torch.set_num_threads(threads)
    together = linear(x), linear(x, norm=norm)
    torch.set_num_threads(1)
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("before", ["plain", "norm", "gate", "up"])
@pytest.mark.parametrize("count", [1, 2, 9, 40])
@pytest.mark.parametrize("bits", BITS)
def test_what_is_not_finite_stays_in_its_row_and_is_not_lost(bits: Bits, count: int, before: str, bad: float) -> None:
    gated = before in ("gate", "up")
    norm = Norm(torch.ones(INPUTS), 1e-5) if before == "norm" else None
    linear = linear_of(GroupedWeight.of(random_weight(40), bits))
    x = random_rows(count, INPUTS * (2 if gated else 1))
    wanted = linear(x, norm=norm, gated=gated)
    for place in (0, 17, 70):
        spoiled = x.clone()
        spoiled[count // 2, place + (INPUTS if before == "up" else 0)] = bad
        found = linear(spoiled, norm=norm, gated=gated)
        others = torch.arange(count) != count // 2
        assert torch.equal(found[others], wanted[others])
        assert not bool(found[count // 2].isfinite().any())


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-30, 1e30, 1e35])
def test_rows_of_any_size(size: float) -> None:
    weight = GroupedWeight.of(torch.randn((16, INPUTS), generator=seeded(0)) * 0.01, 8)
    x = torch.randn((2, INPUTS), generator=seeded(1)).clamp(-3, 3) * size
    found = linear_of(weight)(x).double()
    assert bool(((found - x.double() @ weight.dequantize().double().t()).abs() <= 1.1 * error_bound(x, weight)).all())


PACKED = GroupedWeight.of(random_weight(32), 4).pack()


@pytest.mark.parametrize(
    "given",
    [
        {"x": torch.zeros(2, INPUTS + 32)},
        {"x": torch.zeros(2, INPUTS, dtype=torch.bfloat16)},
        {"x": torch.zeros(2, 2 * INPUTS)[:, :INPUTS]},
        {"x": torch.zeros(INPUTS)},
        {"weight": PACKED[..., :-1].contiguous()},
        {"weight": PACKED.to(torch.int8)},
        {"weight": PACKED.transpose(0, 1)},
        {"bias": torch.zeros(31)},
        {"bias": torch.zeros(32, dtype=torch.float64)},
        {"norm": Norm(torch.ones(INPUTS - 1), 1e-5)},
        {"gated": True},
        {"add_to": torch.zeros(3, 32)},
        {"add_to": torch.zeros(2, 31)},
    ],
    ids=lambda given: f"{next(iter(given))}",
)
def test_what_does_not_fit_is_refused(given: dict[str, object]) -> None:
    fitting = {"x": torch.zeros(2, INPUTS), "weight": PACKED, "bias": torch.zeros(32)}
    assert Products().product(**fitting).shape == (2, 32)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is needed"):
        Products().product(**{**fitting, **given})  # type: ignore[arg-type]


def test_products_share_one_room() -> None:
    products = Products()
    small, large = (GroupedWeight.of(random_weight(40, columns), 4) for columns in (32, 512))
    linears = [PackedLinear(products, weight.pack(), 40) for weight in (small, large, replace(small))]
    for linear, weight in zip(linears, (small, large, small), strict=True):
        x = random_rows(7, weight.u.shape[1])
        assert torch.equal(linear(x), linear_of(weight)(x))
