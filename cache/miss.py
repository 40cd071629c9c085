"""Why a look-up did not find everything."""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum

from cache.node import Node


class Miss(StrEnum):
    """none: all was found. tail: all but the last, unfilled page. limit: more may be cached, but was not asked for.

    new: nothing begins like this. extends: what was cached ends here. diverged: what is cached goes on differently.
    evicted: the next page was cached once and had to go.
    """

    NONE = "none"
    TAIL = "tail"
    LIMIT = "limit"
    NEW = "new"
    EXTENDS = "extends"
    DIVERGED = "diverged"
    EVICTED = "evicted"


class Ghosts:
    """The places where pages were evicted, newest `capacity` only: (what stayed before them, their first page)."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._places: OrderedDict[tuple[int | str, bytes], None] = OrderedDict()

    def add(self, before: Node, key: bytes) -> None:
        self._places[_place(before), key] = None
        if len(self._places) > self._capacity:
            self._places.popitem(last=False)

    def has(self, before: Node, key: bytes) -> bool:
        return (_place(before), key) in self._places


def _place(node: Node) -> int | str:
    """Roots come and go with their namespaces, so these are known by name."""
    return node.namespace if node.parent is None else node.id
