"""Names the reason for a miss, from where a look-up ended in the tree."""

from __future__ import annotations

from itertools import islice

import numpy as np

from cache.miss import Miss, MissKind
from cache.node import Node
from cache.tokens import TokenIds
from cache.tree import PrefixTree

COMPARED_CHILDREN = 64


def explain_miss(tree: PrefixTree, node: Node, ids: TokenIds, asked: int, cached: int, limit: int | None) -> Miss:
    """Of `ids`, the first `asked` (whole pages) were looked up, and the first `cached` found: they end with `node`.

    At a branch the position is exact among the newest 64 children.
    """
    size = tree.page_size
    if cached == len(ids):
        return Miss(MissKind.NONE)
    if limit == 0 and len(ids) > 1:
        return Miss(MissKind.OFF)
    if asked == 0:
        return Miss(MissKind.SHORT)
    if cached == asked:
        return Miss(MissKind.TAIL if cached == len(ids) - len(ids) % size else MissKind.LIMIT)
    wanted = ids[cached : cached + size]
    if tree.ghosts.has(node, wanted.tobytes()):
        return Miss(MissKind.EVICTED, cached)
    same = _same_tokens(node, wanted)
    if cached == same == 0:
        return Miss(MissKind.NEW)
    return Miss(MissKind.EXTENDS if node.childless else MissKind.DIVERGED, cached + same)


def _same_tokens(node: Node, wanted: TokenIds) -> int:
    """How many of the tokens of a page any child of `node` begins with: fewer than all of them."""
    keys = [child.key(wanted.nbytes) for child in islice(reversed(tuple(node.children)), COMPARED_CHILDREN)]
    if not keys or len(wanted) == 1:
        return 0
    equal = np.frombuffer(b"".join(keys), np.int32).reshape(len(keys), len(wanted)) == wanted
    return int(equal.argmin(axis=1).max())
