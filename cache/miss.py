"""Why a look-up did not find everything."""

from __future__ import annotations

from collections import deque
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
    """The places where pages were evicted, newest `capacity` only: hashes of what stayed before and its page."""

    def __init__(self, capacity: int) -> None:
        self._order: deque[int] = deque(maxlen=capacity)
        self._places: set[int] = set()

    def add(self, before: Node, key: bytes) -> None:
        place = hash((_place(before), key))
        if place not in self._places:
            if len(self._order) == self._order.maxlen:
                self._places.remove(self._order[0])
            self._order.append(place)
            self._places.add(place)

    def has(self, before: Node, key: bytes) -> bool:
        return hash((_place(before), key)) in self._places


def _place(node: Node) -> int | str:
    """Roots come and go with their namespaces, so these are known by name."""
    return node.namespace if node.parent is None else node.id
