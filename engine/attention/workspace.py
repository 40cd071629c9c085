"""The memory in which FlashInfer's kernels keep what they attended to of parts of a sequence, until it is merged."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.attention.cascade import requests_of
from engine.attention.paged_kv import PagedKV

_LEAST = 128 << 20
_LARGEST_TILE = 128
_BLOCKS_PER_MULTIPROCESSOR = 2


def workspace_bytes(kv: PagedKV, num_heads: int, batches: Iterable[int] = ()) -> int:
    """What FA2 needs at most: for each head of queries and each tile of them a tile in float32, with its sum
    (PrefillPlan in FlashInfer's scheduler.cuh).

    Where a sequence is split, there are as many tiles as blocks of threads run at a time, each for one head of keys.
    Steps with fixed buffers, of `batches` rows, count as split, and have a tile for each row or group at least.
    """
    cuda = kv.device.type == "cuda"
    blocks = torch.cuda.get_device_properties(kv.device).multi_processor_count if cuda else 1
    group, line = num_heads // kv.shape.num_kv_heads, 4 * (kv.shape.head_dim + 1)
    split = _BLOCKS_PER_MULTIPROCESSOR * blocks * group * _LARGEST_TILE * line
    requests = [(rows, count) for rows in batches for count in {rows, requests_of(rows)}]
    fixed = max((_lines(rows, count, group) for rows, count in requests), default=0)
    return max(_LEAST, split, num_heads * fixed * line)


def _lines(rows: int, requests: int, group: int) -> int:
    """Of all tiles of a head of queries. A tile has 16, 64 or 128 lines, of which a query takes one for each head of
    its group; which size it is follows from the longest request that there may be, and from the card."""
    queries = (rows - requests + 1) * group
    fitting = [tile for tile in (16, 64) if queries <= tile]  # an older card has none of 16
    return max((-(-rows * group // tile) + requests - 1) * tile for tile in fitting or [_LARGEST_TILE, 64])
