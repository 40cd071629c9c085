"""How a converted copy keeps its weights, which follows from what multiplies them: our own kernels, or a card's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import WeightsDtype
from engine.errors import ModelError
from engine.quant.grouped import Bits


@dataclass(frozen=True, slots=True)
class Layout:
    """dense: the type of what a decoder adds and norms, and of weights that are kept as they are. bits: linear layers
    in groups of so many bits, and lm_head in 8 (engine/quant/grouped.py). rowwise: linear layers in this type of 8
    bits with a scale for each output, and lm_head dense (engine/narrow/rowwise.py). At most one of the two.
    """

    dense: torch.dtype
    bits: Bits | None = None
    rowwise: torch.dtype | None = None

    @property
    def name(self) -> str:
        """As in EngineConfig.dtype."""
        if self.rowwise is not None:
            return "int8" if self.rowwise == torch.int8 else "fp8"
        return self._dense_name if self.bits is None else f"int{self.bits}"

    @property
    def folder(self) -> str:
        """Names it among the copies of a model. No name is the beginning of another."""
        return self.name if self.rowwise is None else f"rowwise-{self.name}-{self._dense_name}"

    @property
    def _dense_name(self) -> str:
        return str(self.dense).removeprefix("torch.")


def dense_layout(dtype: WeightsDtype) -> Layout:
    """dtype: of torch, by its name."""
    return Layout(getattr(torch, dtype))


def cpu_layout(wish: WeightsDtype) -> Layout:
    """auto is int4. What cannot be packed is float32 beside packed weights. Raises ModelError for a card's types."""
    if wish == "fp8":
        raise ModelError("fp8 weights are for CUDA: on the CPU, choose int4, int8, bfloat16 or float32")
    if wish in ("auto", "int4"):
        return Layout(torch.float32, 4)
    return Layout(torch.float32, 8) if wish == "int8" else dense_layout(wish)


def rowwise_layout(wish: WeightsDtype, dense: torch.dtype) -> Layout:
    """int8 or fp8, beside numbers of that type."""
    return Layout(dense, rowwise=torch.int8 if wish == "int8" else torch.float8_e4m3fn)
