"""torch's attention over rows of different lengths in one launch (torch.nn.attention.varlen), for CUDA alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module

import torch

from engine.attention.base import LayerAttention
from engine.attention.flash_attn import unsupported
from engine.attention.step_tables import Lengths

_NEEDED = {"scale", "window_size", "enable_gqa"}  # in torch 2.10 it had none of them


class Varlen:
    """FlashAttention (arXiv 2307.08691), as it comes with torch."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        """function: torch's varlen_attn."""
        self._function = function

    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        lengths: Lengths,
        scale: float,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """q [T, Hq, D] against keys and values [S, Hkv, D], all of one type, row by row; gives [T, Hq, D].

        The last token of a row sees all of its keys, the one before all but one, and so on. layer: without a soft cap.
        """
        return self._function(
            q,
            keys,
            values,
            lengths.token_offsets,
            lengths.key_offsets,
            lengths.most_tokens,
            lengths.most_keys,
            scale=scale,
            window_size=(layer.window_left, 0),
            enable_gqa=True,
        )


def find_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> Varlen | None:
    """For attention in that type; None: torch has none here."""
    if device.type != "cuda" or unsupported(head_dim, dtype) is not None:  # they are the same kernels
        return None
    if torch.cuda.get_device_capability(device) < (8, 0) or not torch.backends.cuda.is_flash_attention_available():
        return None
    return varlen_of_torch()


def varlen_of_torch() -> Varlen | None:
    """None where this torch has none, or one that knows too little."""
    try:
        function = import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    return Varlen(function) if inspect.signature(function).parameters.keys() >= _NEEDED else None
