"""The books of one cache: who has which pages, and what is told about it. Leases and the cache both write here."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from cache.errors import OutOfPages
from cache.events import Cleared, EventLog, Removed, Stored
from cache.pins import Pins
from cache.policies import PolicyName, make_policy
from cache.pool import PagePool
from cache.stats import Counters, Usage
from cache.tokens import PageIds
from cache.tree import PrefixTree

if TYPE_CHECKING:
    from cache.lease import Lease


class Ledger:
    """Pool, tree, open leases, counters and events, moved together."""

    def __init__(
        self,
        pool: PagePool,
        policy: PolicyName,
        clock: Callable[[], float],
        max_event_pages: int | None,
        max_pinned_pages: int,
    ) -> None:
        self.pool = pool
        self.leases: set[Lease] = set()
        self.counters = Counters()
        self.events = EventLog(pool.num_pages if max_event_pages is None else max_event_pages)
        self.clock = clock
        self._policy: PolicyName = policy
        self._max_pinned_pages = max_pinned_pages
        self._start()

    @property
    def usage(self) -> Usage:
        free, evictable, locked = self.pool.free_pages, self.tree.evictable_pages, self.tree.locked_pages
        return Usage(free, evictable, locked, self.pool.num_pages - free - evictable - locked)

    def take(self, n_pages: int, after: int | None, may_evict: bool) -> PageIds:
        """Private pages for a lease; evicts the shortfall and no more. Raises OutOfPages and changes nothing."""
        free = self.pool.free_pages
        if n_pages > free:
            self.pins.end_old()
        evictable = self.tree.evictable_pages
        if n_pages > free + (evictable if may_evict else 0):
            raise OutOfPages(n_pages, free, evictable)
        if n_pages > free:
            self.evict(n_pages - free)
        return self.pool.alloc(n_pages, after)

    def evict(self, n_pages: int) -> list[int]:
        self.pins.end_old()
        freed, idle_seconds = self.tree.trim(n_pages)
        self.counters.evicted_pages += len(freed)
        self.counters.evicted_idle_ms += max(0, round(idle_seconds * 1000))
        return self._drop(np.array(freed, np.int32))

    def close_owner(self, owner: str) -> list[int]:
        self.pins.end(owner)
        return self._clear(self.tree.drop_owned(owner))

    def evict_node(self, node_id: int) -> list[int]:
        self.pins.end_old()
        node = self.tree.find(node_id)
        return [] if node is None else self._clear(self.tree.drop_below(node))

    def clear(self) -> bool:
        if self.leases:
            return False
        resident = [np.array(node.pages, np.int32) for node in self.tree.resident_nodes()]
        if resident:
            pages = np.concatenate(resident)
            self.counters.cleared_pages += len(pages)
            self.pool.free(pages)
            self.events.add(Cleared(), 1)
        self._start()
        return True

    def resident(self) -> Iterator[Stored]:
        """What is cached, as the events that would lead there: parents first."""
        for node in self.tree.resident_nodes():
            parent = node.parent.pages[-1] if node.parent is not None and node.parent.pages else None
            yield Stored(node.namespace, parent, np.array(node.pages, np.int32), np.array(node.tokens, np.int32))

    def _start(self) -> None:
        remembered = min(max(self.pool.num_pages // 8, 64), 8192)
        self.tree = PrefixTree(self.pool.page_size, make_policy(self._policy), self.clock, remembered)
        self.pins = Pins(self.tree, self._max_pinned_pages, self.clock)

    def _clear(self, freed: array[int]) -> list[int]:
        self.counters.cleared_pages += len(freed)
        return self._drop(np.array(freed, np.int32))

    def _drop(self, pages: PageIds) -> list[int]:
        if len(pages) == 0:
            return []
        self.pool.free(pages)
        self.events.add(Removed(pages), len(pages))
        return [int(page) for page in pages]
