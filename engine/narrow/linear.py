"""Linear layers with 8-bit weights for CUDA: a card's tensor cores multiply 8 bits by 8 bits.

Both operands are scaled by rows, so that the scales come out of the sums:

    x [rows, K] = a * qx        a: one for each row of a step, from its largest element, found on the device
    w [N, K]    = b * qw        b: one for each output, found at conversion (rowwise.py)
    y [rows, N] = a * b * (qx @ qw.T)

No row sees another one, nothing waits for the device, and no shape depends on numbers: steps can be captured.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.narrow.rowwise import LARGEST, LEAST_SCALE, RowScaled

_TILE = 16
"""Tensor cores work on so many rows at once, and torch._int_mm refuses a single tile in CUDA."""

_MIDDLE = 1.5 * 2**23
"""From here on float32 are whole numbers: adding it rounds, and what was added is in the lowest bits."""

_HIGH = 256
"""What a whole number is in the upper part of an activation."""

_LARGEST_ACTIVATION = 127.0 * _HIGH


class Int8Linear:
    """Weights of 8 bits, activations of 16: few of their elements are large, and 8 bits would lose the small ones.

    Tensor cores see an activation as two numbers of 8 bits, in rows of their own: rows that a step of single tokens
    has to be filled up with anyway, and weights are read once.

        x = a * (256 * high + low)    high: -127 .. 127    low: -128 .. 127    a: largest / 32512

    Sums are exact, so a row is the same to the bit whatever kernel is taken for its step. They stay below 2^31 for up
    to 132,000 inputs. Results are in the type of x.
    """

    def __init__(self, weight: RowScaled, bias: torch.Tensor | None = None) -> None:
        self._q = weight.q.t()
        self._scale = weight.scale / _LARGEST_ACTIVATION
        self._bias = None if bias is None else bias.float()
        self._middle = weight.scale.new_tensor([_MIDDLE])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, inputs = x.shape
        if rows == 0:
            return x.new_empty((0, self._q.shape[1]))
        largest = _largest(x)
        q = torch.empty((_filled(2 * rows), inputs), dtype=torch.int8, device=x.device)
        _split(x, largest, self._middle, q[:rows], q[rows : 2 * rows])
        sums = torch._int_mm(q, self._q)
        scaled = torch.addcmul(sums[rows : 2 * rows] * largest, sums[:rows], largest, value=_HIGH)
        return _scaled(scaled, self._scale, self._bias, x.dtype)


class Fp8Linear:
    """8-bit floats (e4m3), summed in float32. Results are in the type of x.

    To torch the whole operands have the scale 1. It would apply those of rows too, but cuBLASLt has such kernels for
    compute capability 9.0 alone, and there not for few rows of many inputs (github.com/pytorch/ao/issues/4582).
    """

    def __init__(self, weight: RowScaled, bias: torch.Tensor | None = None) -> None:
        self._q = weight.q.t()
        self._scale = weight.scale
        self._bias = None if bias is None else bias.float()
        self._least = weight.scale.new_tensor([LEAST_SCALE])
        self._one = weight.scale.new_ones(1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, inputs = x.shape
        if rows == 0:
            return x.new_empty((0, self._q.shape[1]))
        scale = torch.add(self._least, _largest(x), alpha=1 / LARGEST[torch.float8_e4m3fn])
        q = torch.empty((_filled(rows), inputs), dtype=torch.float8_e4m3fn, device=x.device)
        q[:rows].copy_(x / scale)  # out= would not do: CUDA converts to 8-bit floats only where it copies
        whole, one = F.ScalingType.TensorWise, self._one
        sums = F.scaled_mm(q, self._q, one, whole, one, whole, output_dtype=torch.float32)
        return _scaled(sums[:rows] * scale, self._scale, self._bias, x.dtype)


def narrow_linear(weight: RowScaled, bias: torch.Tensor | None = None) -> Int8Linear | Fp8Linear:
    """By the type of the weight. bias: [N]."""
    return Int8Linear(weight, bias) if weight.q.dtype == torch.int8 else Fp8Linear(weight, bias)


def _filled(rows: int) -> int:
    """Rows of whole tiles, two at least. What stands in those behind the last one is of no consequence."""
    return max(2, -(-rows // _TILE)) * _TILE


def _scaled(y: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """y [rows, N] float32 * scale [N] + bias [N], rounded once.

    CUDA multiplies in the widest type of all; many other operations would compute in that of `out`.
    """
    if bias is not None:
        return torch.addcmul(bias, y, scale).to(dtype)
    return torch.mul(y, scale, out=torch.empty(y.shape, dtype=dtype, device=y.device))


def _largest(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each row: [rows, 1] float32. A row that is not finite has none, and no finite result."""
    largest: torch.Tensor = torch.linalg.vector_norm(x, float("inf"), dim=-1, keepdim=True, dtype=torch.float32)
    return largest


def _split(x: torch.Tensor, largest: torch.Tensor, middle: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Rounds x to parts of its row's largest magnitude, and writes both halves: [rows, K] int8. middle: float32 [1].

    The halves are the lowest bytes of a float32 (the lowest first); adding half a step of the upper one rounds that to
    the nearest. A row of zeros becomes whatever there is, which is multiplied by zero.
    """
    whole = torch.addcdiv(middle, x, largest, value=_LARGEST_ACTIVATION)
    parts = whole.view(torch.int8)
    low.copy_(parts[:, ::4])
    whole.add_(_HIGH // 2)
    high.copy_(parts[:, 1::4])
