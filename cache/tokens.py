"""Token ids at the edge of the cache: whatever comes in becomes one int32 array, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

TokenIds: TypeAlias = npt.NDArray[np.int32]
PageIds: TypeAlias = npt.NDArray[np.int32]
Tokens: TypeAlias = Sequence[int] | npt.NDArray[Any]

_INT32 = np.iinfo(np.int32)


def as_tokens(tokens: Tokens) -> TokenIds:
    """`tokens` as a one-dimensional, contiguous int32 array; the very same object where it is one already.

    Raises ValueError for more than one dimension, for what is not integers, and for ids outside int32.
    """
    given = np.asarray(tokens)
    if given.ndim != 1:
        raise ValueError(f"tokens must have one dimension, not {given.ndim}")
    if given.dtype == np.int32:
        return np.ascontiguousarray(given)
    if given.size == 0:
        return np.empty(0, np.int32)
    if given.dtype.kind not in "iu":
        raise ValueError(f"tokens must be integers, not {given.dtype}")
    if given.min() < _INT32.min or given.max() > _INT32.max:
        raise ValueError("token ids must fit into 32 bits")
    return given.astype(np.int32)
