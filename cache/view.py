"""Copies of the tree for people to look at."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from cache.ledger import Ledger
from cache.node import Node
from cache.tree import PrefixTree

PREVIEW_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A copy of one node: whole pages, its first token ids, who holds it, hits, and its place in time.

    `id` is None above the namespaces. `locks` counts leases and pins. `last_use` is the logical time of the last use,
    below zero for what entered at the cold end; `idle_seconds` is how long ago that was (0 where there are no pages).
    `owner` is the only one who ever used the node. `subtree_pages` and `sessions` (the owners with pages of their own)
    count the node and all below it. `hidden_children` were left out by depth or limit: ask again with this node's id.
    """

    id: int | None
    namespace: str | None
    n_tokens: int
    n_pages: int
    subtree_pages: int
    first_tokens: tuple[int, ...]
    locks: int
    pinned: bool
    hits: int
    last_use: int
    idle_seconds: float
    owner: str | None
    sessions: int
    children: tuple[TreeNode, ...]
    hidden_children: int


@dataclass(slots=True)
class _Draft:
    node: Node
    depth: int
    children: list[_Draft] = field(default_factory=list)


def copy_tree(ledger: Ledger, node_id: int | None, depth: int, limit: int) -> TreeNode | None:
    """See PrefixCache.tree."""
    tree = ledger.tree
    if node_id is not None:
        node = tree.find(node_id)
        return None if node is None else _grow(ledger, [_Draft(node, 0)], depth, limit)[0]
    tops = [_Draft(root, 0) for root in list(tree.roots.values())[: max(0, limit)] if depth > 0]
    copies = tuple(_grow(ledger, tops, depth - 1, limit))
    return TreeNode(
        id=None,
        namespace=None,
        n_tokens=0,
        n_pages=0,
        subtree_pages=tree.locked_pages + tree.evictable_pages,
        first_tokens=(),
        locks=0,
        pinned=False,
        hits=0,
        last_use=0,
        idle_seconds=0.0,
        owner=None,
        sessions=len(tree.owned),
        children=copies,
        hidden_children=len(tree.roots) - len(copies),
    )


def _grow(ledger: Ledger, tops: list[_Draft], depth: int, limit: int) -> list[TreeNode]:
    """Copies breadth first, so that a small limit shows the top of every branch; then freezes from the leaves up."""
    drafts, queue = list(tops), deque(tops)
    while queue and len(drafts) < limit:
        draft = queue.popleft()
        if draft.depth < depth:
            room = limit - len(drafts)
            draft.children = [_Draft(child, draft.depth + 1) for child in list(draft.node.children)[:room]]
            drafts.extend(draft.children)
            queue.extend(draft.children)
    now, page_size = ledger.clock(), ledger.pool.page_size
    totals = _totals(ledger.tree, [top.node for top in tops])
    pinned = {step.id for node in ledger.pins.nodes() for step in ledger.tree.path(node)}
    done: dict[int, TreeNode] = {}
    for draft in reversed(drafts):
        node = draft.node
        done[node.id] = TreeNode(
            id=node.id,
            namespace=node.namespace,
            n_tokens=len(node.pages) * page_size,
            n_pages=len(node.pages),
            subtree_pages=totals[node.id].pages,
            first_tokens=tuple(node.tokens[:PREVIEW_TOKENS]),
            locks=node.locks,
            pinned=node.id in pinned,
            hits=node.hits,
            last_use=node.stamp,
            idle_seconds=max(0.0, now - node.used_at) if node.pages else 0.0,
            owner=node.owner,
            sessions=totals[node.id].sessions,
            children=tuple(done[child.node.id] for child in draft.children),
            hidden_children=len(node.children) - len(draft.children),
        )
    return [done[draft.node.id] for draft in tops]


class _Total(NamedTuple):
    pages: int
    sessions: int


def _totals(tree: PrefixTree, tops: list[Node]) -> dict[int, _Total]:
    """Pages and owners of every node and all below it. The largest set of owners grows on its way up."""
    totals: dict[int, _Total] = {}
    owners: dict[int, set[str]] = {}
    for node in reversed([node for top in tops for node in tree.walk_nodes(top)]):
        parts = sorted((owners.pop(child.id) for child in node.children), key=len)
        mine = parts.pop() if parts else set()
        mine.update(*parts)
        if node.owner is not None:
            mine.add(node.owner)
        owners[node.id] = mine
        totals[node.id] = _Total(len(node.pages) + sum(totals[child.id].pages for child in node.children), len(mine))
    return totals
