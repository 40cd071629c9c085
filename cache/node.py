"""One node of the prefix tree: a stretch of whole pages that all its users share."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Node:
    """`pages` hold the keys and values of `tokens` (page_size tokens each), which follow those of `parent`.

    Both are compact copies of 32-bit integers. A root has neither, and no parent. `locks` counts the leases and pins
    whose path runs through the node, so it never exceeds the parent's. `stamp` orders by last use, and is below zero
    for what entered at the cold end; `used_at` is the same in seconds, `known` the share of that user's prompt that the
    cache held or had held before. `owner` is the only one who ever used the node, or None. `hits`, `born` and `entry`
    belong to the eviction policy.

    Children are known by the bytes of their first page. Most nodes have one child or none: only those with more pay
    for a dictionary.
    """

    id: int
    namespace: str
    parent: Node | None
    tokens: array[int]
    pages: array[int]
    locks: int = 0
    stamp: int = 0
    used_at: float = 0.0
    known: float = 0.0
    priority: int = 0
    owner: str | None = None
    hits: int = 0
    born: int = 0
    entry: object | None = None
    _children: Node | dict[bytes, Node] | None = None

    @property
    def evictable_leaf(self) -> bool:
        return self.locks == 0 and self._children is None and self.parent is not None

    @property
    def childless(self) -> bool:
        return self._children is None

    @property
    def children(self) -> Collection[Node]:
        """Oldest first."""
        held = self._children
        if held is None:
            return ()
        return (held,) if isinstance(held, Node) else held.values()

    def key(self, key_bytes: int) -> bytes:
        """What the parent knows this node by."""
        return self.tokens[: key_bytes // self.tokens.itemsize].tobytes()

    def child(self, key: bytes) -> Node | None:
        held = self._children
        if isinstance(held, dict):
            return held.get(key)
        return held if held is not None and held.key(len(key)) == key else None

    def adopt(self, key: bytes, child: Node) -> None:
        """Takes in a child, in place of the one that has this key."""
        held = self._children
        if isinstance(held, dict):
            held[key] = child
        elif held is None or held.key(len(key)) == key:
            self._children = child
        else:
            self._children = {held.key(len(key)): held, key: child}

    def drop(self, key: bytes) -> None:
        held = self._children
        if isinstance(held, dict):
            del held[key]
        if not isinstance(held, dict) or not held:
            self._children = None
