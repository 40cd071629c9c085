"""transformers' attention interface: its models call a registered function where they would attend.

The function serves all models of the process and keeps nothing: who attends comes with every call, as an argument of
the model's forward that transformers hands through to its layers.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from engine.attention import LayerAttention
from engine.errors import ModelError

NAME = "chatd"


class Attend(Protocol):
    """Attends with q [T, Hq, D] to k and v [T, Hkv, D] and to what came before them; gives [T, Hq, D].

    options: what the model says about this layer. extras: everything else that it passes to its attention.
    """

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: LayerAttention,
        extras: dict[str, Any],
    ) -> torch.Tensor: ...


def register() -> None:
    """Makes the function known to transformers as NAME. No mask is registered with it, so that models build none."""
    AttentionInterface.register(NAME, _attention)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    chatd_attend: Attend | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """query, key and value: [1, H, T, D], after positions. Gives [1, T, Hq, D]."""
    if chatd_attend is None:
        raise ModelError(f"{type(module).__name__} is not handed the arguments of its model's forward")
    layer: Any = getattr(module, "layer_idx", None)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    extras["attention_mask"] = attention_mask
    attended = chatd_attend(layer, q, k, v, LayerAttention(sliding_window, softcap, scaling), extras)
    return attended[None].to(query.dtype), None
