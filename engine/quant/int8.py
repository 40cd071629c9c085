"""8-bit weights, one scale an output, multiplied by FBGEMM with activations of 16 bits: as two rows of 8 bits each.

    x[r] / peak = high + low / (2 * steps)        high in steps of 1 / steps, low of what it leaves
    y[r] = peak * (high @ w + low @ w / (2 * steps)),   peak = max |x[r]|

8 bits alone cost 2 to 3 % of perplexity (docs/performance.md). Reading the weights is the cost, so the second row is
nearly free. A row's scale is its own: no row depends on the others of a step.
"""

from __future__ import annotations

import warnings

import torch


class Int8Linear:
    """Weights [N, K] int8 with a float32 scale for each of the N."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = None if bias is None else bias.float()
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's quantized tensors are deprecated, their products are not
            quantized = torch._make_per_channel_quantized_tensor(weight, scale.double(), zeros, 0)
        self._packed = torch.ops.quantized.linear_prepack(quantized, None)
        # Without VNNI two neighbouring products are added in 16 bits: 7 bits cannot overflow them.
        self._steps = 127 if torch.cpu._is_vnni_supported() else 63

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.float()
        peaks = rows.abs().amax(-1, keepdim=True).clamp_min_(1e-30)
        rows = rows / peaks
        low = rows.sub(rows.mul(self._steps).round_(), alpha=1.0 / self._steps)
        both = torch.cat((rows, low.mul_(2 * self._steps)))
        y: torch.Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            both, 1.0 / self._steps, self._steps + 1, self._packed
        )
        y = y[: len(x)].add_(y[len(x) :], alpha=0.5 / self._steps).mul_(peaks)
        return (y if self._bias is None else y.add_(self._bias)).to(x.dtype)


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] to int8 and one float32 scale a row, symmetric."""
    rows = weight.float()
    scale = (rows.abs().amax(-1) / 127.0).clamp_min(1e-8)
    return (rows / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale
