"""The prefix cache: which pages hold the keys and values of which tokens, and who may use them."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from cache.check import check_ledger
from cache.events import Event
from cache.lease import Lease
from cache.ledger import Ledger
from cache.miss import Miss
from cache.node import Node
from cache.policies import PolicyName
from cache.pool import PagePool
from cache.stats import CacheStats, Usage
from cache.tokens import TokenIds, Tokens, as_tokens
from cache.tree import Holder
from cache.view import TreeNode, copy_tree


class PrefixCache:
    """Finds, keeps and evicts prefixes of token sequences in the pages of a pool, which must be its own.

    One thread makes the calls; what they return may go to any thread. Order of use is an internal counter; `clock`
    (seconds) only measures how long evicted pages lay idle. Events are kept, up to `max_event_pages` pages in all
    (None: as many as the pool has), until they are drained.
    """

    def __init__(
        self,
        pool: PagePool,
        policy: PolicyName = "lru",
        clock: Callable[[], float] = time.monotonic,
        max_event_pages: int | None = None,
    ) -> None:
        self._ledger = Ledger(pool, policy, clock, max_event_pages)

    def acquire(
        self,
        tokens: Tokens,
        *,
        namespace: str = "",
        limit: int | None = None,
        priority: int = 0,
        owner: str | None = None,
        record: bool = True,
    ) -> Lease:
        """Finds the longest cached prefix of `tokens`, whole pages and at most `limit` tokens of it, and locks it.

        Namespaces never share pages. priority (used by the policy of that name) protects the prefix with higher ones.
        owner tags what only it uses, for `close`. record=False for re-runs, which count as no lookup. Raises ValueError
        for a negative limit or what is no token sequence. The caller releases the lease, also after OutOfPages.
        """
        ids = as_tokens(tokens)
        tree = self._ledger.tree
        data = self._whole_pages(ids, limit)
        node, found = tree.settle(tree.walk(tree.root(namespace), data))
        path = tree.path(node)
        holder = Holder(owner, priority)
        tree.lock(path, holder)
        tree.touch(path)
        for step in path:
            tree.policy.hit(step)
        cached = found * tree.page_size
        return Lease(
            self._ledger,
            node,
            np.frombuffer(b"".join(step.pages for step in path), np.int32),
            cached_tokens=cached,
            known_tokens=cached,
            miss=self._miss(ids, data, node, cached),
            holder=holder,
            uncounted=len(ids) if record else None,
        )

    def match_length(self, tokens: Tokens, namespace: str = "") -> int:
        """Tokens of the longest cached prefix, page aligned. Changes nothing: no lock, no stamp, no count."""
        tree = self._ledger.tree
        root = tree.roots.get(namespace)
        if root is None:
            return 0
        walk = tree.walk(root, self._whole_pages(as_tokens(tokens), None))
        return (walk.pages + walk.inside_pages) * tree.page_size

    def evict(self, n_pages: int) -> list[int]:
        """Frees up to `n_pages` evictable pages, and returns them in the order in which they went."""
        return self._ledger.evict(n_pages)

    def close(self, owner: str) -> list[int]:
        """Frees the pages that only `owner` has ever used and that nobody holds, and returns them, children first."""
        return self._ledger.close_owner(owner)

    def reset(self) -> bool:
        """Empties the cache. False, and nothing changed, while any lease is open."""
        return self._ledger.clear()

    def check(self) -> None:
        """Recounts everything; for tests and suspicions. Raises CacheCorruption."""
        check_ledger(self._ledger)

    @property
    def usage(self) -> Usage:
        return self._ledger.usage

    @property
    def stats(self) -> CacheStats:
        return self._ledger.counters.read()

    def drain_events(self) -> list[Event]:
        """The events since the last drain, oldest first. Replayed, they give the set of cached pages."""
        return self._ledger.events.drain(self._ledger.resident)

    def tree(self, node: int | None = None, depth: int = 2, limit: int = 100) -> TreeNode | None:
        """A copy of the tree from `node` (an id from an earlier copy; None: all namespaces) `depth` levels down.

        At most `limit` nodes, breadth first. None when the node is there no more.
        """
        return copy_tree(self._ledger.tree, node, depth, limit)

    def _whole_pages(self, ids: TokenIds, limit: int | None) -> bytes:
        if limit is not None and limit < 0:
            raise ValueError("limit must not be negative")
        length = len(ids) if limit is None else min(limit, len(ids))
        return ids[: length - length % self._ledger.pool.page_size].tobytes()

    def _miss(self, ids: TokenIds, data: bytes, node: Node, cached: int) -> Miss:
        size = self._ledger.pool.page_size
        if cached == len(ids):
            return Miss.NONE
        if cached * ids.itemsize == len(data):
            return Miss.TAIL if cached == len(ids) - len(ids) % size else Miss.LIMIT
        if self._ledger.tree.ghosts.has(node, ids[cached : cached + size].tobytes()):
            return Miss.EVICTED
        if cached == 0:
            return Miss.NEW
        return Miss.DIVERGED if node.children else Miss.EXTENDS
