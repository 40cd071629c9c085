"""Linear layers with 8-bit weights for CUDA. Needs torch alone, as tests/gpu does."""

from engine.narrow.linear import Fp8Linear, Int8Linear, narrow_linear
from engine.narrow.rowwise import RowScaled

__all__ = ["Fp8Linear", "Int8Linear", "RowScaled", "narrow_linear"]
