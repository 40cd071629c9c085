"""Machine code for CPUs, written in Python and compiled for the processor at hand (LLVM, by way of llvmlite).

torch has no product of 4-bit weights with 8-bit activations, and no attention that reads keys and values where they
lie; and each of its operations costs microseconds, of which a token of a small model has few (docs/performance.md).
"""

from engine.kernels.geometry import Geometry
from engine.kernels.library import Heads, Norm, Products, attention_kernel, float_bits, new_program, run_kernel
from engine.kernels.program import Kernel, Program

__all__ = [
    "Geometry",
    "Heads",
    "Kernel",
    "Norm",
    "Products",
    "Program",
    "attention_kernel",
    "float_bits",
    "new_program",
    "run_kernel",
]
