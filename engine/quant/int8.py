"""8-bit weights, one scale an output, multiplied by FBGEMM with activations of 8 bits, or of 16 as two rows of 8.

    x[r] / peak = high + low / (2 * steps)        high in steps of 1 / steps, low of what it leaves
    y[r] = peak * (high @ w + low @ w / (2 * steps)),   peak = max |x[r]|

A row's scale is its own, and it alone decides what is done with it: no row depends on the others of a step.
What 8 bits alone cost, and what these layers cost: docs/performance.md.
"""

from __future__ import annotations

import warnings
from threading import Lock

import torch

from engine.native import multiplies_int8

MOST_JOINED_ROWS = 32  # beyond, one product of twice the rows saves less than it costs to join them

_ONE_AT_A_TIME = Lock()  # warnings.catch_warnings is not for threads, and layers are loaded by several


class _PackedWeights:
    """Weights [N, K] int8 with a float32 scale for each of the N, in FBGEMM's order."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        with _ONE_AT_A_TIME, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's quantized tensors are deprecated, their products are not
            quantized = torch._make_per_channel_quantized_tensor(weight, scale.double(), zeros, 0)
        self._packed = torch.ops.quantized.linear_prepack(quantized, None)
        # Without VNNI two neighbouring products are added in 16 bits: 7 bits cannot overflow them.
        self.steps = 127 if multiplies_int8() else 63

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, N] float32 of [R, K] float32 in -1 .. 1, which are rounded to steps of 1 / steps."""
        y: torch.Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows, 1.0 / self.steps, self.steps + 1, self._packed
        )
        return y

    def rest(self, rows: torch.Tensor) -> torch.Tensor:
        """What `product` rounds off, times 2 * steps: in -1 .. 1 again."""
        return rows.sub(rows.mul(self.steps).round_(), alpha=1.0 / self.steps).mul_(2 * self.steps)


class Int8Linear:
    """8-bit weights and activations of 16 bits: as good as exact. Reading the weights is the cost at few rows, so the
    second row is nearly free there."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weights = _PackedWeights(weight, scale)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.float()
        peaks = _peaks(rows)
        rows = rows / peaks
        rest = self._weights.rest(rows)
        if len(x) <= MOST_JOINED_ROWS:
            high, low = self._weights.product(torch.cat((rows, rest))).chunk(2)
        else:
            high, low = self._weights.product(rows), self._weights.product(rest)
        y = high.add_(low, alpha=0.5 / self._weights.steps).mul_(peaks)
        return y if self._bias is None else y.add_(self._bias)


class SmoothedInt8Linear:
    """8-bit weights and activations of 8 bits, whose channels were evened out (SmoothQuant, arXiv 2211.10438):
    x @ w.T = (x / smoothing) @ (w * smoothing).T, smoothing [K] float32. `weight` is the smoothed one."""

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, smoothing: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        self._weights = _PackedWeights(weight, scale)
        self._inverse = smoothing.reciprocal()
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x * self._inverse
        peaks = _peaks(rows)
        y = self._weights.product(rows.div_(peaks)).mul_(peaks)
        return y if self._bias is None else y.add_(self._bias)


def _peaks(rows: torch.Tensor) -> torch.Tensor:
    return rows.abs().amax(-1, keepdim=True).clamp_min_(1e-30)


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] to int8 and one float32 scale a row, symmetric."""
    rows = weight.float()
    scale = (rows.abs().amax(-1) / 127.0).clamp_min(1e-8)
    return (rows / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale


def smoothing_of(peaks: torch.Tensor, weight: torch.Tensor, strength: float = 0.7) -> torch.Tensor:
    """[K] float32: peaks ** strength / weight_peaks ** (1 - strength), with a geometric mean of 1.

    peaks: [K] largest |x| of each channel. weight: [N, K]. Ones where the peaks are not finite.
    """
    if not bool(peaks.isfinite().all()):
        return torch.ones_like(peaks)
    inputs, weights = peaks.float(), weight.float().abs().amax(0)
    logs = strength * _floored(inputs).log() - (1 - strength) * _floored(weights).log()
    return (logs - logs.mean()).exp()


def _floored(peaks: torch.Tensor) -> torch.Tensor:
    """Channels that are never used count as hardly used."""
    return peaks.clamp_min(float(peaks.amax()) * 1e-5).clamp_min_(1e-30)
