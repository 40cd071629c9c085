"""Products of 8-bit weights on a device (engine/narrow) beside float64: rows, types, company, and a captured step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from engine.narrow import RowScaled, narrow_linear
from tests.gpu.checks import Check
from tests.gpu.device import Device

E4M3 = torch.float8_e4m3fn

ROWS = (1, 8, 16, 17, 64, 300)
INPUTS, OUTPUTS = 512, 256

_TOLERANCE = {torch.int8: 4e-3, E4M3: 4.5e-2}
"""Norm of an error over that of the result: bfloat16 has 8 bits, an 8-bit float is off by 2.6 % on average."""


def narrow_types(device: Device) -> tuple[torch.dtype, ...]:
    """Those that the device multiplies. CUDA: e4m3 from compute capability 8.9 on."""
    old = device.torch.type == "cuda" and torch.cuda.get_device_capability(device.torch) < (8, 9)
    return (torch.int8,) if old else (torch.int8, E4M3)


def short(dtype: torch.dtype) -> str:
    return "int8" if dtype == torch.int8 else "fp8"


def product_checks(device: Device) -> Iterator[Check]:
    for narrow in narrow_types(device):
        for given in (torch.bfloat16, torch.float16):
            name = f"products: {short(narrow)} weights, {str(given).removeprefix('torch.')}"
            yield Check(name, frozenset(), partial(check_product, device, narrow, given))


def check_product(device: Device, narrow: torch.dtype, given: torch.dtype) -> None:
    """Beside the product of the rounded weight with unrounded rows; the captured step is run again for other rows."""
    generator = torch.Generator(device.torch).manual_seed(0)

    def numbers(rows: int, columns: int) -> torch.Tensor:
        return torch.randn((rows, columns), generator=generator, device=device.torch)

    weight, bias = RowScaled.of(numbers(OUTPUTS, INPUTS), narrow), numbers(1, OUTPUTS)[0].to(given)
    linear = narrow_linear(weight, bias)
    x = (numbers(ROWS[-1], INPUTS) * torch.logspace(-1, 1, ROWS[-1], device=device.torch)[:, None]).to(given)
    exact = F.linear(x.double(), weight.dequantize().double(), bias.double())
    whole = linear(x)
    for rows in ROWS:
        _close(linear(x[:rows]), exact[:rows], narrow)
        if narrow == torch.int8 and not torch.equal(linear(x[:rows]), whole[:rows]):
            raise AssertionError(f"{rows} rows are not the same in a step of {len(x)}")
    kept = x[:8].clone()
    found: list[torch.Tensor] = []
    replay = device.capture(lambda: found.append(linear(kept)))
    kept.copy_(x[100:108])
    replay()
    device.synchronize()
    _close(found[-1], exact[100:108], narrow)


def _close(y: torch.Tensor, exact: torch.Tensor, narrow: torch.dtype) -> None:
    """Row by row, so that no large one hides a small one."""
    off = ((y.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max()
    if not float(off) < _TOLERANCE[narrow]:
        raise AssertionError(f"a row of {len(y)} is not close: off by {float(off):.4f}")
