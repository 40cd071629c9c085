"""Runs machine code on the threads that torch computes with.

torch's threads are OpenMP's. A second set of threads would compete with them for the cores; so the code runs as one
more parallel region of theirs. Where their library is not found, or is not GNU's, it runs on one thread.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import llvmlite.binding as llvm
import torch
from llvmlite import ir

from engine.kernels.simd import I32, I64, Function, Value

_BARRIER, _THREAD, _THREADS = "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads"


class Threads:
    """The threads of one process. Code that is compiled against them finds its number and meets the others."""

    def __init__(self) -> None:
        self._library = _load()
        if self._library is not None:
            for name in (_BARRIER, _THREAD, _THREADS):
                llvm.add_symbol(name, ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value)
            self._parallel = self._library.GOMP_parallel
            self._parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            self._parallel.restype = None

    @property
    def shared(self) -> bool:
        """Whether there may be more than one."""
        return self._library is not None

    def run(self, function: int, arguments: int) -> None:
        """Runs the function at this address on every thread, with the address of its arguments; waits for all."""
        if self._library is None:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(arguments)
        else:
            self._parallel(function, arguments, torch.get_num_threads(), 0)

    def number(self, f: Function) -> tuple[Value, Value]:
        """The number of the thread that runs `f`, and how many there are; int64."""
        if self._library is None:
            return f.integer(0), f.integer(1)
        return f.call(_THREAD, I32).to(I64), f.call(_THREADS, I32).to(I64)

    def meet(self, f: Function) -> None:
        """Waits until every thread has got here."""
        if self._library is not None:
            f.call(_BARRIER, ir.VoidType())

    def share(self, f: Function, amount: Value) -> tuple[Value, Value]:
        """Which of 0 .. amount - 1 are this thread's: first, behind the last."""
        number, threads = self.number(f)
        return amount * number // threads, amount * (number + 1) // threads


def _load() -> ctypes.CDLL | None:
    """The library that torch has loaded: where its wheels for x86 and for Arm have it."""
    package = Path(torch.__file__).parent
    for path in (*sorted(package.glob("lib/libgomp*")), *sorted(package.parent.glob("torch.libs/libgomp*"))):
        return ctypes.CDLL(str(path))
    return None
