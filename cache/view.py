"""Copies of the tree for people to look at."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from cache.node import Node
from cache.tree import PrefixTree

PREVIEW_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A copy of one node: whole pages, its first token ids, the leases that hold it, hits, and its place in time.

    `id` is None above the namespaces. `last_use` is the logical time of the last use, below zero for what entered at
    the cold end. `hidden_children` were left out by depth or limit: ask again with this node's id.
    """

    id: int | None
    namespace: str | None
    n_pages: int
    first_tokens: tuple[int, ...]
    locks: int
    hits: int
    last_use: int
    owner: str | None
    children: tuple[TreeNode, ...]
    hidden_children: int


@dataclass(slots=True)
class _Draft:
    node: Node
    depth: int
    children: list[_Draft] = field(default_factory=list)


def copy_tree(tree: PrefixTree, node_id: int | None, depth: int, limit: int) -> TreeNode | None:
    """See PrefixCache.tree."""
    if node_id is None:
        tops = [_Draft(root, 0) for root in list(tree.roots.values())[: max(0, limit)] if depth > 0]
        copies = tuple(_grow(tops, depth - 1, limit))
        return TreeNode(None, None, 0, (), 0, 0, 0, None, copies, len(tree.roots) - len(copies))
    node = tree.nodes.get(node_id) or next((root for root in tree.roots.values() if root.id == node_id), None)
    return None if node is None else _grow([_Draft(node, 0)], depth, limit)[0]


def _grow(tops: list[_Draft], depth: int, limit: int) -> list[TreeNode]:
    """Copies breadth first, so that a small limit shows the top of every branch; then freezes from the leaves up."""
    drafts, queue = list(tops), deque(tops)
    while queue and len(drafts) < limit:
        draft = queue.popleft()
        if draft.depth < depth:
            room = limit - len(drafts)
            draft.children = [_Draft(child, draft.depth + 1) for child in list(draft.node.children.values())[:room]]
            drafts.extend(draft.children)
            queue.extend(draft.children)
    done: dict[int, TreeNode] = {}
    for draft in reversed(drafts):
        node = draft.node
        done[node.id] = TreeNode(
            id=node.id,
            namespace=node.namespace,
            n_pages=len(node.pages),
            first_tokens=tuple(node.tokens[:PREVIEW_TOKENS]),
            locks=node.locks,
            hits=node.hits,
            last_use=node.stamp,
            owner=node.owner,
            children=tuple(done[child.node.id] for child in draft.children),
            hidden_children=len(node.children) - len(draft.children),
        )
    return [done[draft.node.id] for draft in tops]
