"""The most likely tokens of each row, exactly: equal logits are told apart by their ids."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any, Protocol

import torch

log = logging.getLogger(__name__)

_MOST_SELECTED = 2048
_LOWER_IDS = 1


class MostLikely(Protocol):
    def __call__(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k largest logits of each row of float32 [P, vocab] and their ids (int64): [P, k] in any order. Of those
        that equal the least one it takes the lowest ids."""
        ...


class SortedMostLikely:
    """By sorting whole rows, on any device."""

    def __call__(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values[:, :k], ids[:, :k]


class FlashInferMostLikely:
    """By FlashInfer's selection, which reads a row a few times and sorts nothing. For k up to 2,048, and for cards with
    128 KB of memory in each multiprocessor: the selection for others does not tell equal logits apart."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._sorted = SortedMostLikely()

    def __call__(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        if len(logits) == 0 or k > _MOST_SELECTED or k == logits.shape[1]:
            return self._sorted(logits, k)
        values, ids = self._kernels.top_k(logits.contiguous(), k, deterministic=True, tie_break=_LOWER_IDS)
        return values, ids


def most_likely_by_flashinfer() -> MostLikely:
    """FlashInfer's where the card can have it; it is compiled here when it is first needed."""
    try:
        kernels = import_module("flashinfer.topk")
        if kernels.can_implement_filtered_topk():
            return FlashInferMostLikely(kernels)
        reason = "the card has too little memory in a multiprocessor"
    except (ImportError, AttributeError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    log.info("the most likely tokens are found by sorting: %s", reason)
    return SortedMostLikely()
