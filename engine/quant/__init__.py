"""Weight layouts: how a linear layer's weights are stored, and which product reads them fastest."""

from engine.quant.linear import DenseLinear, Int4Linear, Int8Linear, Linear

__all__ = ["DenseLinear", "Int4Linear", "Int8Linear", "Linear"]
