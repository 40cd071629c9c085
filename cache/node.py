"""One node of the prefix tree: a stretch of whole pages that all its users share."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Node:
    """`pages` hold the keys and values of `tokens` (page_size tokens each), which follow those of `parent`.

    Both are compact copies of 32-bit integers. A root has neither, and no parent. `children` is keyed by the bytes of
    a child's first page. `locks` counts the leases whose path runs through the node, so it never exceeds the parent's.
    `stamp` orders by last use, and is below zero for what entered at the cold end. `used_at` is the same in seconds.
    `owner` is the only one who ever used the node, or None. The last fields belong to the eviction policy.
    """

    id: int
    namespace: str
    parent: Node | None
    tokens: array[int]
    pages: array[int]
    locks: int = 0
    stamp: int = 0
    used_at: float = 0.0
    priority: int = 0
    owner: str | None = None
    children: dict[bytes, Node] = field(default_factory=dict)
    hits: int = 0
    born: int = 0
    entry: object | None = None

    @property
    def evictable_leaf(self) -> bool:
        return self.locks == 0 and not self.children and self.parent is not None

    def key(self, page_size: int) -> bytes:
        """What the parent files this node under."""
        return self.tokens[:page_size].tobytes()
