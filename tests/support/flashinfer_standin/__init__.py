"""FlashInfer for tests: checks every argument as a GPU would punish it, and computes the same in torch, on the CPU.

It is stricter than the real one where that has no checks and would read or write whatever is there: dtypes of indices,
ranges, host or device memory, who writes where, what was planned, and copies that are still in flight.
"""

from tests.support.flashinfer_standin.module import Standin, install

__all__ = ["Standin", "install"]
