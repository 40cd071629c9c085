"""Prefixes that are kept for a time although no lease holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cache.errors import PinLimit
from cache.node import Node
from cache.tree import Holder, PrefixTree


@dataclass(frozen=True, slots=True)
class Pin:
    """`n_pages` pages of `namespace`, from the start of a sequence, stay for `owner` until the clock says `expires`."""

    owner: str
    namespace: str
    n_pages: int
    expires: float


class Pins:
    """One pin for each owner. Like a lease, a pin locks the path from the root to its node."""

    def __init__(self, tree: PrefixTree, max_pages: int, clock: Callable[[], float]) -> None:
        self._tree = tree
        self._max_pages = max_pages
        self._clock = clock
        self._held: dict[str, tuple[Pin, Node]] = {}

    def add(self, owner: str, node: Node, seconds: float) -> Pin:
        """Holds the path to `node`, in place of what the owner held. Raises PinLimit and changes nothing.

        A path without pages is not held: the pin that is returned is over already.
        """
        self.end_old()
        path = self._tree.path(node)
        others = {step for name, (_, end) in self._held.items() if name != owner for step in self._tree.path(end)}
        wanted = sum(len(step.pages) for step in others.union(path))
        if wanted > self._max_pages:
            raise PinLimit(wanted, self._max_pages)
        pin = Pin(owner, node.namespace, sum(len(step.pages) for step in path), self._clock() + seconds)
        self._tree.lock(path, Holder(owner))
        self.end(owner)
        self._held[owner] = pin, node
        if pin.n_pages == 0:
            self.end(owner)
        return pin

    def end(self, owner: str) -> None:
        if (held := self._held.pop(owner, None)) is not None:
            self._tree.unlock(held[1])

    def end_old(self) -> None:
        if self._held:
            now = self._clock()
            for pin in self.read():
                if pin.expires <= now:
                    self.end(pin.owner)

    def read(self) -> tuple[Pin, ...]:
        return tuple(pin for pin, _ in self._held.values())

    def nodes(self) -> Iterator[Node]:
        """The node at the end of each pin."""
        return (node for _, node in self._held.values())
