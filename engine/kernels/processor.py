"""What the processor that machine code is written for can do."""

from __future__ import annotations

from dataclasses import dataclass

import llvmlite.binding as llvm

from engine.kernels.simd import F32, I8, I16, I32, Function, Value


@dataclass(frozen=True, slots=True)
class Processor:
    """cpu, features: LLVM's names for it and for what it has, as `+name,-name`."""

    cpu: str
    features: str

    @classmethod
    def host(cls) -> Processor:
        return cls(llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())

    def has(self, feature: str) -> bool:
        return f"+{feature}" in self.features.split(",")

    @property
    def tile_rows(self) -> int:
        """Rows of a product that are computed together: as many as there are registers for."""
        return 8 if self.has("avx512f") else 3

    def dot4(self, f: Function, total: Value, u: Value, s: Value, bits: int) -> Value:
        """total + the sum of four products, in each of 16 lanes of int32.

        u: four unsigned numbers of so many bits in each lane. s: four signed ones of 8 bits.
        """
        if self.has("avx512vnni"):
            return f.call("llvm.x86.avx512.vpdpbusd.512", total.type, total, u, s)
        if self.has("avx2") and bits == 4:
            return total + self._pairwise(f, u, s)
        fours = u.bits(I8, 64).to(I32, signed=False) * s.bits(I8, 64).to(I32)
        for lane in range(4):
            total = total + fours.shuffle(range(lane, 64, 4))
        return total

    def floats(self, f: Function, halves: Value) -> Value:
        """Finite float16 as float32. LLVM calls a function that need not be there where the processor has none."""
        if self.has("f16c") or self.has("fullfp16"):
            return halves.to(F32)
        bits = halves.as_type(I16).to(I32, signed=False)
        magnitude = ((bits & 0x7FFF) << 13).as_type(F32) * 2.0**112
        return (magnitude.as_type(I32) | ((bits & 0x8000) << 16)).as_type(F32)

    def _pairwise(self, f: Function, u: Value, s: Value) -> Value:
        """With AVX2, which adds two products in 16 bits: products of 4 and 8 bits cannot overflow them."""
        halves = []
        for first in (0, 32):
            lanes = range(first, first + 32)
            some = [value.bits(I8, 64).shuffle(lanes) for value in (u, s)]
            pairs = f.call("llvm.x86.avx2.pmadd.ub.sw", f.vector(I16, 16), *some)
            ones = f.like(1, pairs)
            halves.append(f.call("llvm.x86.avx2.pmadd.wd", f.vector(I32, 8), pairs, ones))
        return halves[0].shuffle(range(16), halves[1])
