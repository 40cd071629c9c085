"""Why a look-up did not find everything."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from cache.node import Node


class MissKind(StrEnum):
    """none: all was found. tail: all but the last, unfilled page. limit: more may be cached, but was not asked for.

    off: nothing was asked for. short: there was no whole page to ask for. new: nothing begins like this.
    extends: what was cached ends here. diverged: what is cached goes on differently. evicted: the next page was cached
    once and had to go.
    """

    NONE = "none"
    TAIL = "tail"
    LIMIT = "limit"
    OFF = "off"
    SHORT = "short"
    NEW = "new"
    EXTENDS = "extends"
    DIVERGED = "diverged"
    EVICTED = "evicted"


@dataclass(frozen=True, slots=True)
class Miss:
    """A kind, and for extends, diverged and evicted the first token that was not found: `diverged@37` as text.

    What diverged inside a page has its first tokens in common with the cache, though the page is no hit.
    """

    kind: MissKind
    at: int | None = None

    def __str__(self) -> str:
        return self.kind if self.at is None else f"{self.kind}@{self.at}"


class Ghosts:
    """The places where pages were evicted, newest `capacity` only: (what stayed before them, their first page)."""

    def __init__(self, capacity: int) -> None:
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
