"""Weight layouts: how a linear layer's weights are stored, and which product reads them fastest."""

from engine.quant.int8 import Int8Linear, SmoothedInt8Linear
from engine.quant.linear import DenseLinear, Int4Linear, Linear

__all__ = ["DenseLinear", "Int4Linear", "Int8Linear", "Linear", "SmoothedInt8Linear"]
