"""The radix tree over token ids, one root per namespace. Walks are loops: depth is bounded by memory alone."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from cache.miss import Ghosts
from cache.node import Node
from cache.policies import Policy

TOKEN_BYTES = 4


class Walk(NamedTuple):
    """How far a sequence leads: `pages` whole pages to the end of `node`, then `inside_pages` more into its child."""

    node: Node
    pages: int
    inside: Node | None
    inside_pages: int


@dataclass(frozen=True, slots=True)
class Holder:
    """On whose behalf nodes are locked. `known` is the share of its prompt that the cache held or had held before.

    `cold`: what it stores enters at the cold end of the order.
    """

    owner: str | None
    priority: int = 0
    known: float = 0.0
    cold: bool = False


class PrefixTree:
    """Nodes, locks, recency and page counts. It moves no page: what it drops, it returns.

    Sequences are the bytes of int32 tokens, whole pages only. The last `remembered` places of eviction are known.
    """

    def __init__(self, page_size: int, policy: Policy, clock: Callable[[], float], remembered: int) -> None:
        self.page_size = page_size
        self.policy = policy
        self.roots: dict[str, Node] = {}
        self.owned: dict[str, set[Node]] = {}
        self.ghosts = Ghosts(remembered)
        self.locked_pages = 0
        self.evictable_pages = 0
        self._clock = clock
        self._width = page_size * TOKEN_BYTES
        self._ids = count()
        self._warm_stamps = count(1)
        self._cold_stamps = count(-1, -1)

    def root(self, namespace: str) -> Node:
        """The root of a namespace, made at need; it goes when its last lease and last child have gone."""
        root = self.roots.get(namespace)
        if root is None:
            root = Node(next(self._ids), namespace, None, array("i"), array("i"))
            self.roots[namespace] = root
        return root

    def walk(self, node: Node, data: bytes) -> Walk:
        """Follows `data` down from the end of `node` as far as the tree spells it. Changes nothing."""
        width, position, end = self._width, 0, len(data)
        while position < end:
            child = node.child(data[position : position + width])
            if child is None:
                break
            size = len(child.pages) * width
            if size > width and (position + size > end or not data.startswith(child.tokens, position)):
                return Walk(node, position // width, child, self._common_pages(child, data, position))
            node = child
            position += size
        return Walk(node, position // width, None, 0)

    def settle(self, walk: Walk) -> tuple[Node, int]:
        """The node at whose end the walk stops, split off at need, and the pages matched."""
        if walk.inside is None:
            return walk.node, walk.pages
        return self._split(walk.inside, walk.inside_pages), walk.pages + walk.inside_pages

    def path(self, node: Node, above: Node | None = None) -> list[Node]:
        """The nodes from below `above` (None: from the root on) down to `node`."""
        nodes = []
        step: Node | None = node
        while step is not None and step is not above:
            nodes.append(step)
            step = step.parent
        nodes.reverse()
        return nodes

    def lock(self, nodes: list[Node], holder: Holder) -> None:
        """Holds a stretch of a path whose upper end is a root, or is held by the same lease already."""
        for node in nodes:
            if node.locks == 0:
                size = len(node.pages)
                self.evictable_pages -= size
                self.locked_pages += size
                if node.evictable_leaf:
                    self.policy.locked(node)
            node.locks += 1
            node.priority = max(node.priority, holder.priority)
            if node.owner is not None and node.owner != holder.owner:
                self._disown(node)

    def unlock(self, node: Node) -> None:
        """Lets go of the path from the root to `node`."""
        step: Node | None = node
        while step is not None:
            step.locks -= 1
            if step.locks == 0:
                size = len(step.pages)
                self.locked_pages -= size
                self.evictable_pages += size
                if step.evictable_leaf:
                    self.policy.unlocked(step)
                elif step.parent is None and step.childless:
                    del self.roots[step.namespace]
            step = step.parent

    def touch(self, nodes: list[Node], holder: Holder) -> None:
        """Stamps held nodes as used now."""
        stamp, seconds = next(self._warm_stamps), self._clock()
        for node in nodes:
            node.stamp, node.used_at, node.known = stamp, seconds, holder.known

    def append(self, node: Node, own: Node | None, data: bytes, pages: bytes, holder: Holder) -> Node:
        """Stores held pages behind `node`, and returns the node that ends with them, held.

        `own` is the node that this lease has made last: it is extended in place while nobody else has come to it, so
        that all pages of a node always have the same past.
        """
        untouched = node is own and node.locks == 1 and node.hits == 0 and node.owner == holder.owner
        if untouched and node.childless and not holder.cold:
            leaf = node
        else:
            leaf = Node(next(self._ids), node.namespace, node, array("i"), array("i"), locks=1)
            leaf.priority, leaf.owner = holder.priority, holder.owner
            if holder.cold:
                leaf.stamp, leaf.used_at = next(self._cold_stamps), self._clock()
            node.adopt(data[: self._width], leaf)
            if leaf.owner is not None:
                self.owned.setdefault(leaf.owner, set()).add(leaf)
            self.policy.inserted(leaf)
        leaf.tokens.frombytes(data)
        leaf.pages.frombytes(pages)
        self.locked_pages += len(pages) // leaf.pages.itemsize
        return leaf

    def trim(self, n_pages: int) -> tuple[array[int], float]:
        """Drops up to `n_pages` evictable pages, one by one from the end of the policy's victims.

        Returns them in that order, and the seconds since their last use, summed over the pages. Of a path that goes
        page by page only the last cut is remembered: no look-up can come to the earlier ones.
        """
        freed, idle, now = array("i"), 0.0, self._clock()
        victim, missing = self.policy.victim, n_pages
        cut: tuple[Node, bytes] | None = None
        while missing > 0 and (node := victim()) is not None:
            if cut is not None and cut[0] is not node:
                self.ghosts.add(*cut)
            held = len(node.pages)
            going = min(held, missing)
            missing -= going
            idle += going * (now - node.used_at)
            if going < held:
                first = (held - going) * self.page_size
                freed.extend(reversed(node.pages[held - going :]))
                cut = node, node.tokens[first : first + self.page_size].tobytes()
                del node.pages[held - going :], node.tokens[first:]
                self.evictable_pages -= going
            else:
                freed.extend(node.pages if held == 1 else reversed(node.pages))
                cut = self._remove(node)
        if cut is not None:
            self.ghosts.add(*cut)
        return freed, idle

    def drop_owned(self, owner: str) -> array[int]:
        """Drops what `owner` alone has ever used and nobody holds, and returns its pages, children first."""
        freed = array("i")
        for start in list(self.owned.get(owner, ())):
            node = start
            while node.owner == owner and node.evictable_leaf:
                freed.extend(reversed(node.pages))
                node, _ = self._remove(node)
        return freed

    def drop_below(self, top: Node) -> array[int]:
        """Drops what nobody holds of `top` and everything below it, and returns its pages, children first."""
        freed = array("i")
        for node in reversed(list(self.walk_nodes(top))):
            if node.evictable_leaf:
                freed.extend(reversed(node.pages))
                self._remove(node)
        return freed

    def find(self, node_id: int) -> Node | None:
        """The node or root of that id, in O(nodes)."""
        nodes = (node for root in self.roots.values() for node in self.walk_nodes(root))
        return next((node for node in nodes if node.id == node_id), None)

    def walk_nodes(self, top: Node) -> Iterator[Node]:
        """`top` and every node below it, parents first."""
        stack = [top]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)

    def resident_nodes(self) -> Iterator[Node]:
        """Every node that has pages, parents first."""
        return (node for root in self.roots.values() for node in self.walk_nodes(root) if node.parent is not None)

    def _split(self, node: Node, n_pages: int) -> Node:
        """Moves the first pages of `node` into a new parent. `node` stays the deep end: leases on it stay right."""
        assert node.parent is not None
        cut = n_pages * self.page_size
        upper = Node(next(self._ids), node.namespace, node.parent, node.tokens[:cut], node.pages[:n_pages])
        upper.stamp, upper.used_at, upper.known = node.stamp, node.used_at, node.known
        upper.locks, upper.priority, upper.owner = node.locks, node.priority, node.owner
        node.parent.adopt(node.key(self._width), upper)
        node.parent, node.tokens, node.pages = upper, node.tokens[cut:], node.pages[n_pages:]
        upper.adopt(node.key(self._width), node)
        if upper.owner is not None:
            self.owned[upper.owner].add(upper)
        self.policy.split(upper, node)
        return upper

    def _remove(self, node: Node) -> tuple[Node, bytes]:
        """Takes an evictable leaf out of the tree. Returns its parent and the key it was filed under."""
        parent, key = node.parent, node.key(self._width)
        assert parent is not None
        parent.drop(key)
        if node.owner is not None:
            self._disown(node)
        self.evictable_pages -= len(node.pages)
        self.policy.removed(node)
        if parent.childless and parent.locks == 0:
            if parent.parent is not None:
                self.policy.unlocked(parent)
            else:
                del self.roots[parent.namespace]
        return parent, key

    def _disown(self, node: Node) -> None:
        assert node.owner is not None
        nodes = self.owned[node.owner]
        nodes.remove(node)
        if not nodes:
            del self.owned[node.owner]
        node.owner = None

    def _common_pages(self, node: Node, data: bytes, position: int) -> int:
        length = min(len(node.tokens), (len(data) - position) // TOKEN_BYTES)
        given = np.frombuffer(data, np.int32, length, position)
        differs = given != np.frombuffer(node.tokens, np.int32, length)
        first = int(differs.argmax())
        same = first if differs[first] else length
        return same // self.page_size
