"""The prefix cache: which pages hold the keys and values of which tokens, and who may use them."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from cache.check import check_ledger
from cache.events import Event
from cache.lease import Lease
from cache.ledger import Ledger
from cache.lookup import explain_miss
from cache.miss import MissKind
from cache.pins import Pin
from cache.policies import PolicyName
from cache.pool import PagePool
from cache.stats import CacheStats, Usage
from cache.tokens import TokenIds, Tokens, as_tokens
from cache.tree import Holder
from cache.view import TreeNode, copy_tree


class PrefixCache:
    """Finds, keeps and evicts prefixes of token sequences in the pages of a pool, which must be its own.

    One thread makes the calls; what they return may go to any thread. Order of use is an internal counter; `clock`
    (seconds) ends pins, and measures how long pages lay idle. Events are kept, up to `max_event_pages` pages in all
    (None: as many as the pool has), until they are drained. Pins hold at most `max_pinned_pages` (None: a quarter of
    the pool).
    """

    def __init__(
        self,
        pool: PagePool,
        policy: PolicyName = "lru",
        clock: Callable[[], float] = time.monotonic,
        max_event_pages: int | None = None,
        max_pinned_pages: int | None = None,
    ) -> None:
        pinned = pool.num_pages // 4 if max_pinned_pages is None else max_pinned_pages
        self._ledger = Ledger(pool, policy, clock, max_event_pages, pinned)

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
        cached = found * tree.page_size
        miss = explain_miss(tree, node, ids, len(data) // ids.itemsize, cached, limit)
        known = 1.0 if miss.kind is MissKind.EVICTED else cached / max(1, len(ids))
        holder = Holder(owner, priority, known)
        path = tree.path(node)
        tree.lock(path, holder)
        tree.touch(path, holder)
        for step in path:
            tree.policy.hit(step)
        return Lease(
            self._ledger,
            node,
            np.frombuffer(b"".join(step.pages for step in path), np.int32),
            cached_tokens=cached,
            known_tokens=cached,
            miss=miss,
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

    def evict_node(self, node: int) -> list[int]:
        """Frees what nobody holds of a node (an id from `tree`) and all below it, and returns it, children first."""
        return self._ledger.evict_node(node)

    def close(self, owner: str) -> list[int]:
        """Frees the pages that only `owner` has ever used and that nobody holds, and returns them, children first.

        Ends the owner's pin.
        """
        return self._ledger.close_owner(owner)

    def pin(self, owner: str, tokens: Tokens, *, seconds: float, namespace: str = "") -> Pin:
        """Keeps what is cached of `tokens`, whole pages, from eviction for `seconds`; replaces the owner's earlier pin.

        A pin is no use: it stamps and counts nothing. When its time is over its pages go by their place in the order,
        as soon as room is needed. Raises PinLimit, and leaves everything as it was, where all pins together would hold
        more than they may.
        """
        tree = self._ledger.tree
        node, _ = tree.settle(tree.walk(tree.root(namespace), self._whole_pages(as_tokens(tokens), None)))
        return self._ledger.pins.add(owner, node, seconds)

    def unpin(self, owner: str) -> None:
        """Ends the owner's pin, if there is one."""
        self._ledger.pins.end(owner)

    @property
    def pins(self) -> tuple[Pin, ...]:
        """The pins that hold pages now."""
        return self._ledger.pins.read()

    def owners(self) -> dict[str, int]:
        """For every owner the pages that `close` would free if nobody held them, in O(nodes with an owner)."""
        owned = self._ledger.tree.owned
        return {owner: sum(len(node.pages) for node in nodes) for owner, nodes in owned.items()}

    def reset(self) -> bool:
        """Empties the cache and ends all pins. False, and nothing changed, while any lease is open."""
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

        At most `limit` nodes, breadth first. None when the node is there no more. Costs O(nodes), for the sums over
        all that is not shown.
        """
        return copy_tree(self._ledger, node, depth, limit)

    def _whole_pages(self, ids: TokenIds, limit: int | None) -> bytes:
        if limit is not None and limit < 0:
            raise ValueError("limit must not be negative")
        length = len(ids) if limit is None else min(limit, len(ids))
        return ids[: length - length % self._ledger.pool.page_size].tobytes()
