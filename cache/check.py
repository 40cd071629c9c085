"""Recounts everything from the ground up and compares it with the books."""

from __future__ import annotations

from collections import Counter

import numpy as np

from cache.errors import CacheCorruption
from cache.ledger import Ledger
from cache.node import Node
from cache.tree import TOKEN_BYTES


def check_ledger(ledger: Ledger) -> None:
    """Costs O(pool + tree). Raises CacheCorruption with the first thing that does not add up."""
    nodes = list(ledger.tree.resident_nodes())
    _check_shape(ledger, nodes)
    _check_locks(ledger, nodes)
    _check_owners(ledger, nodes)
    _check_pages(ledger, nodes)


def _check_shape(ledger: Ledger, nodes: list[Node]) -> None:
    tree, size = ledger.tree, ledger.pool.page_size
    width = size * TOKEN_BYTES
    _require(len({node.id for node in nodes}) == len(nodes), "two nodes have one id")
    for namespace, root in tree.roots.items():
        _require(root.namespace == namespace and root.parent is None and not root.pages, "a root is no root")
        _require(bool(root.children) or root.locks > 0, f"the empty namespace {namespace!r} was kept")
    for node in [*tree.roots.values(), *nodes]:
        _require(len(node.tokens) == size * len(node.pages), f"node {node.id}: tokens do not fill its pages")
        keys = {child.key(width) for child in node.children}
        _require(len(keys) == len(node.children), f"two children of node {node.id} begin alike")
        for child in node.children:
            _require(node.child(child.key(width)) is child, f"node {child.id} is filed under other tokens")
            _require(child.parent is node and len(child.pages) > 0, f"node {child.id} is filed under a stranger")
            _require(child.namespace == node.namespace, f"node {child.id} is in another namespace")
    for node in nodes:
        _require((node in tree.policy) == node.evictable_leaf, f"node {node.id}: candidate and evictable leaf differ")


def _check_locks(ledger: Ledger, nodes: list[Node]) -> None:
    tree = ledger.tree
    held = Counter(lease._node.id for lease in ledger.leases)
    held.update(node.id for node in ledger.pins.nodes())
    for node in [*nodes, *tree.roots.values()]:
        expected = held[node.id] + sum(child.locks for child in node.children)
        _require(node.locks == expected, f"node {node.id} has {node.locks} locks instead of {expected}")
    locked = sum(len(node.pages) for node in nodes if node.locks)
    resident = sum(len(node.pages) for node in nodes)
    _require(locked == tree.locked_pages, f"{locked} pages are locked, {tree.locked_pages} counted")
    _require(resident - locked == tree.evictable_pages, "evictable pages and their count differ")
    _require(ledger.counters.read().resident_pages == resident, "the counters do not give the resident pages")


def _check_owners(ledger: Ledger, nodes: list[Node]) -> None:
    owned: dict[str, set[Node]] = {}
    for node in nodes:
        if node.owner is not None:
            owned.setdefault(node.owner, set()).add(node)
    _require(owned == ledger.tree.owned, "owners and their nodes differ")


def _check_pages(ledger: Ledger, nodes: list[Node]) -> None:
    pool, tree = ledger.pool, ledger.tree
    parts = [pool.check()]
    parts += [np.array(node.pages, np.int32) for node in nodes]
    for lease in ledger.leases:
        full = lease.committed_tokens // pool.page_size
        path = b"".join(step.pages for step in tree.path(lease._node))
        _require(lease.pages[:full].tobytes() == path, "a lease's table and its path differ")
        parts.append(lease.pages[full:])
    places = np.bincount(np.concatenate(parts), minlength=pool.num_pages)
    _require(len(places) == pool.num_pages and bool((places == 1).all()), "a page is lost, or in two places")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise CacheCorruption(message)
