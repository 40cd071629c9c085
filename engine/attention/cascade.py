"""Attention of single tokens whose rows begin with the same pages: these are read once for all of them.

    q, in the order of the groups --> pages of the group, all visible to its rows --> attended, log of the sum --.
                                `---> a row's own pages, its token among them    --> attended, log of the sum --+
                                                                       back to the order of the rows <-- merged <-'

Both parts are softmaxes over some of the keys; what they attended to is added up in proportion to the sums of their
exponentials, in float32 (Hydragen, arXiv 2402.05099; FlashInfer's cascade inference). The logarithms are to base 2.
Rows of no group see no keys in the first part: FlashInfer then gives zeros, and for the logarithm -5e4 and a little,
which is nothing beside any other.

It is worth it where many bytes need not be read. For each layer it takes about five more launches: two gathers of
queries and results, the first part, the merging of what that was split into, and the merging of both parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

LEAST_SAVED = 64 << 20
"""Bytes of keys and values that a layer need not read, for a step to be computed in two parts: 16 µs at 4 TB/s, about
what five launches of a graph take. An estimate, not measured: `make test-gpu` has both side by side."""

MOST_GROUPS = 31
"""In a step. Each has a tile of its own in the workspace, even where it has few rows."""

_MOST_THREADS = 1024
_ELEMENTS_OF_A_THREAD = 8


def can_merge(num_heads: int, head_dim: int) -> bool:
    """Whether FlashInfer's kernel can: it takes all heads of a token in one block (MergeStateInPlace in cascade.cuh,
    for elements of two bytes)."""
    return num_heads * head_dim // _ELEMENTS_OF_A_THREAD <= _MOST_THREADS


def requests_of(rows: int) -> int:
    """How many requests the first part of a step with fixed buffers has: the groups that there may be, each of two rows
    at least, and one for the rows of none."""
    return min(rows // 2, MOST_GROUPS) + 1


@dataclass(frozen=True, slots=True)
class Cascade:
    """Runs as FlashInfer's wrappers do. shared, own: wrappers, planned for the two parts. order, inverse: see
    SharedTables, on the device."""

    flashinfer: Any
    shared: Any
    own: Any
    order: torch.Tensor
    inverse: torch.Tensor

    def run(self, q: torch.Tensor, kv: torch.Tensor, **scales: float) -> torch.Tensor:
        """scales: of keys and values. Those of the keys are in the logarithms, as they are in the scores."""
        q = q.index_select(0, self.order)
        attended: torch.Tensor
        attended, log_sums = self.own.run(q, kv, return_lse=True, **scales)
        others, their_log_sums = self.shared.run(q, kv, return_lse=True, **scales)
        self.flashinfer.merge_state_in_place(attended, log_sums, others, their_log_sums)
        return attended.index_select(0, self.inverse)


def compile_merging(flashinfer: Any, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Merges nothing, so that no request waits for the kernel to be compiled."""
    attended = torch.zeros(1, num_heads, head_dim, dtype=dtype, device=device)
    log_sums = torch.zeros(1, num_heads, dtype=torch.float32, device=device)
    flashinfer.merge_state_in_place(attended, log_sums, attended.clone(), log_sums.clone())
