"""Which evictable leaf goes first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias, get_args

from cache.node import Node

PolicyName: TypeAlias = Literal["lru", "lfu", "fifo", "mru", "filo", "slru", "priority", "turns"]


class Policy(Protocol):
    """Told what happens in the tree, asked for victims. A candidate is a node without children that no lease holds.

    The tree keeps `stamp`, `known` and `priority`; `hits`, `born` and `entry` are the policy's own.
    """

    def inserted(self, node: Node) -> None:
        """A lease has made this node, and holds it."""

    def hit(self, node: Node) -> None:
        """A look-up has matched the whole node, which is held now."""

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` is new and took the first pages of `lower`, which stays what it was: candidate or not."""

    def unlocked(self, node: Node) -> None:
        """The node has become a candidate: its last lease or its last child is gone."""

    def locked(self, node: Node) -> None:
        """The candidate is held again."""

    def removed(self, node: Node) -> None:
        """The candidate has left the tree."""

    def victim(self) -> Node | None:
        """The candidate whose last page goes next; None when there is none. Changes nothing that can be seen."""

    def __contains__(self, node: Node) -> bool:
        """Whether the node is a candidate."""


class HeapPolicy:
    """Candidates in a heap by a key that is fixed while they are candidates.

    Entries of nodes that were locked or removed stay in the heap until they surface or outnumber the others.
    """

    def __init__(self, key: Callable[[Node], Any]) -> None:
        self._key = key
        self._heap: list[tuple[Any, int, Node]] = []
        self._candidates = 0

    def inserted(self, node: Node) -> None:
        node.born = node.id

    def hit(self, node: Node) -> None:
        node.hits += 1

    def split(self, upper: Node, lower: Node) -> None:
        upper.hits, upper.born = lower.hits, lower.born

    def unlocked(self, node: Node) -> None:
        node.entry = entry = (self._key(node), node.id, node)
        heapq.heappush(self._heap, entry)
        self._candidates += 1

    def locked(self, node: Node) -> None:
        node.entry = None
        self._candidates -= 1
        if len(self._heap) > 2 * self._candidates + 64:
            self._heap = [entry for entry in self._heap if entry[2].entry is entry]
            heapq.heapify(self._heap)

    def removed(self, node: Node) -> None:
        node.entry = None
        self._candidates -= 1

    def victim(self) -> Node | None:
        while self._heap:
            entry = self._heap[0]
            if entry[2].entry is entry:
                return entry[2]
            heapq.heappop(self._heap)
        return None

    def __contains__(self, node: Node) -> bool:
        return node.entry is not None


class TurnsPolicy(HeapPolicy):
    """lru in which conversations under way stay longer than those that may be over after their first turn.

    A later turn asks mostly for what the cache knows, a first turn mostly for what is new, and later turns are the
    more likely to be followed by another one. So a use counts as if it came later: by as long as pages last now,
    measured on the victims, times the share of the prompt that was known. What was evicted and is asked for again was
    known too. There is nothing to tune.
    """

    MEASURED_VICTIMS = 100

    def __init__(self) -> None:
        super().__init__(self._due)
        self._newest = 0
        self._lifetime = 0.0

    def victim(self) -> Node | None:
        node = super().victim()
        if node is not None and node.stamp > 0:
            self._lifetime += (self._newest - node.stamp - self._lifetime) / self.MEASURED_VICTIMS
        return node

    def _due(self, node: Node) -> float:
        self._newest = max(self._newest, node.stamp)
        return node.stamp + node.known * self._lifetime


_POLICIES: Mapping[PolicyName, Callable[[], Policy]] = MappingProxyType(
    {
        "lru": lambda: HeapPolicy(lambda node: node.stamp),
        "lfu": lambda: HeapPolicy(lambda node: (node.hits, node.stamp)),
        "fifo": lambda: HeapPolicy(lambda node: node.born),
        "mru": lambda: HeapPolicy(lambda node: -node.stamp),
        "filo": lambda: HeapPolicy(lambda node: -node.born),
        "slru": lambda: HeapPolicy(lambda node: (node.hits >= 2, node.stamp)),
        "priority": lambda: HeapPolicy(lambda node: (node.priority, node.stamp)),
        "turns": TurnsPolicy,
    }
)


def make_policy(name: PolicyName) -> Policy:
    """A policy by name, with no candidates. Raises ValueError for a name that there is not.

    lru: least recently used. lfu: fewest hits, then lru. fifo, filo: oldest, newest node. mru: most recently used.
    slru: lru among nodes with fewer than two hits, then among the rest. priority: lowest, then lru.
    turns: lru, with a head start for conversations under way.
    """
    if name not in _POLICIES:
        raise ValueError(f"no eviction policy {name!r}; there are {', '.join(get_args(PolicyName))}")
    return _POLICIES[name]()
