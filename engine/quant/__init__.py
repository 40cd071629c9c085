"""Linear layers: dense, or with weights packed to 4 or 8 bits. Those for CUDA are in engine.narrow."""

from engine.quant.grouped import GroupedWeight
from engine.quant.linear import DenseLinear, Linear, PackedLinear, load_linear

__all__ = ["DenseLinear", "GroupedWeight", "Linear", "PackedLinear", "load_linear"]
