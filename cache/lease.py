"""A running sequence's hold on its pages: what it found, what it stored, what it writes next."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from cache.errors import LeaseClosed
from cache.events import Stored
from cache.ledger import Ledger
from cache.miss import Miss, MissKind
from cache.node import Node
from cache.tokens import PageIds, Tokens, as_tokens
from cache.tree import Holder


class TailCopy(NamedTuple):
    """The first `n_tokens` of page `src` must be copied to page `dst` before either sequence writes again."""

    src: int
    dst: int
    n_tokens: int


class Lease:
    """Made by `PrefixCache.acquire`, ended by `release`.

        tokens   0 ------ cached ------ committed ------ reserved
        pages    |  in the tree, locked  |   private    |

    committed is page aligned; a commit moves it on, a reserve moves reserved on. Every call but `release`, and reading
    `pages`, raises LeaseClosed once the lease is released.
    """

    __slots__ = (
        "_cached",
        "_closed",
        "_committed",
        "_holder",
        "_known",
        "_ledger",
        "_miss",
        "_namespace",
        "_node",
        "_own",
        "_pages",
        "_table",
        "_tail_copy",
        "_uncounted",
    )

    def __init__(
        self,
        ledger: Ledger,
        node: Node,
        pages: PageIds,
        *,
        cached_tokens: int,
        known_tokens: int,
        miss: Miss,
        holder: Holder,
        uncounted: int | None,
        tail_copy: TailCopy | None = None,
    ) -> None:
        """For the cache's own use. `node` and its path are locked already; `pages` beyond it are private."""
        self._ledger = ledger
        self._node = node
        self._own: Node | None = None
        self._namespace = node.namespace
        self._committed = known_tokens - known_tokens % ledger.pool.page_size
        self._known = known_tokens
        self._holder = holder
        self._uncounted = uncounted
        self._table = pages
        self._pages = _frozen(pages)
        self._closed = False
        self._cached = cached_tokens
        self._miss = miss
        self._tail_copy = tail_copy
        ledger.leases.add(self)

    @property
    def cached_tokens(self) -> int:
        """Tokens found at acquire: page aligned, at most the limit. Never changes, not even by release."""
        return self._cached

    @property
    def miss(self) -> Miss:
        """Why acquire did not find everything."""
        return self._miss

    @property
    def tail_copy(self) -> TailCopy | None:
        """On a fork of a sequence with an unfilled last page: what the caller has to copy."""
        return self._tail_copy

    @property
    def pages(self) -> PageIds:
        """The page table: read-only int32, in sequence order. Cheap to read.

        An array that was read never changes; after reserve or commit, read again.
        """
        self._check_open()
        return self._pages

    @property
    def committed_tokens(self) -> int:
        """Tokens of this sequence in the tree, page aligned."""
        return self._committed

    def reserve(self, n_tokens: int, *, may_evict: bool = True) -> None:
        """Room for `n_tokens` in all, from the start of the sequence; fewer than there are is no change.

        Evicts exactly what is missing. With may_evict=False (work that nobody waits for) only free pages are taken,
        and what is committed from then on enters at the cold end. Raises OutOfPages and leaves everything as it was.
        """
        self._check_open()
        ledger = self._ledger
        missing = -(-n_tokens // ledger.pool.page_size) - len(self._pages)
        if missing > 0:
            after = int(self._pages[-1]) if len(self._pages) else None
            self._append(ledger.take(missing, after, may_evict))
        if self._holder.cold == may_evict:
            self._holder = replace(self._holder, cold=not may_evict)
        if self._uncounted is not None:
            ledger.counters.lookups += 1
            ledger.counters.query_tokens += self._uncounted
            ledger.counters.hit_tokens += self._cached
            self._uncounted = None

    def commit(self, tokens: Tokens) -> None:
        """The keys and values of `tokens`, everything computed so far from the start of the sequence, are valid.

        Full pages join the tree. Where another lease stored the same tokens first, `pages` changes to the tree's pages
        and the duplicates are freed: no launched step may still use them. Only what lies beyond `committed_tokens` is
        read, so `tokens` may be a view of a growing buffer; a commit that fills no page costs next to nothing, and
        changes no recency. Raises ValueError for fewer tokens than before, more than are reserved, or what is no token.
        """
        self._check_open()
        size = self._ledger.pool.page_size
        known = len(tokens)
        if not self._known <= known <= len(self._pages) * size:
            raise ValueError(
                f"{known} tokens: not between {self._known} committed and {len(self._pages) * size} reserved"
            )
        end = known - known % size
        if end > self._committed:
            self._store(as_tokens(tokens[self._committed : end]).tobytes(), end)
        self._known = known

    def fork(self) -> Lease:
        """Another lease on what is committed, for a second branch of the same sequence.

        The tokens beyond `committed_tokens` are in this lease's private page. Where there are such, the fork has a
        private page of its own and `tail_copy` says what to copy there. Counts as no lookup, stamps nothing. Raises
        OutOfPages and leaves everything as it was.
        """
        self._check_open()
        ledger = self._ledger
        full = self._committed // ledger.pool.page_size
        tail = self._known - self._committed
        pages = self._pages[:full].copy()
        tail_copy = None
        if tail:
            page = ledger.take(1, None, may_evict=True)
            pages = np.concatenate((pages, page))
            tail_copy = TailCopy(int(self._pages[full]), int(page[0]), tail)
        ledger.tree.lock(ledger.tree.path(self._node), self._holder)
        return Lease(
            ledger,
            self._node,
            pages,
            cached_tokens=self._committed,
            known_tokens=self._known,
            miss=Miss(MissKind.TAIL if tail else MissKind.NONE),
            holder=self._holder,
            uncounted=None,
            tail_copy=tail_copy,
        )

    def release(self) -> None:
        """Private pages go back to the pool; committed ones stay cached, evictable once nobody else holds them.

        Releasing again does nothing. No launched step may still use the pages.
        """
        if self._closed:
            return
        self._closed = True
        ledger = self._ledger
        ledger.leases.remove(self)
        ledger.pool.free(self._pages[self._committed // ledger.pool.page_size :])
        ledger.tree.unlock(self._node)

    def _store(self, data: bytes, end: int) -> None:
        """Moves the pages of `data`, which follow the committed ones up to token `end`, into the tree."""
        ledger = self._ledger
        tree, size = ledger.tree, ledger.pool.page_size
        base, stop = self._committed // size, end // size
        above = self._node
        node, found = tree.settle(tree.walk(above, data))
        if found:
            passed = tree.path(node, above)
            tree.lock(passed, self._holder)
            duplicates = self._pages[base : base + found]
            self._rewrite(base, b"".join(step.pages for step in passed))
            ledger.pool.free(duplicates)
            ledger.counters.duplicate_pages += found
        if base + found < stop:
            fresh = self._pages[base + found : stop]
            rest = data[found * size * fresh.itemsize :]
            parent = int(self._pages[base + found - 1]) if base + found else None
            node = self._own = tree.append(node, self._own, rest, fresh.tobytes(), self._holder)
            ledger.counters.inserted_pages += len(fresh)
            if ledger.events.recording:
                stored = Stored(self._namespace, parent, fresh.copy(), np.frombuffer(rest, np.int32))
                ledger.events.add(stored, len(fresh))
        if not self._holder.cold:
            tree.touch(tree.path(node), self._holder)
        self._node, self._committed = node, end

    def _append(self, pages: PageIds) -> None:
        """Lengthens the table in place where its buffer has room: tables that were read see only their own length."""
        held, wanted = len(self._pages), len(self._pages) + len(pages)
        if wanted > len(self._table):
            table = np.empty(max(wanted, 2 * held), np.int32)
            table[:held] = self._pages
            self._table = table
        self._table[held:wanted] = pages
        self._pages = _frozen(self._table[:wanted])

    def _rewrite(self, start: int, pages: bytes) -> None:
        """Puts other pages at `start`, into a new table: tables that were read stay as they were."""
        ids = np.frombuffer(pages, np.int32)
        self._table = self._pages.copy()
        self._table[start : start + len(ids)] = ids
        self._pages = _frozen(self._table)

    def _check_open(self) -> None:
        if self._closed:
            raise LeaseClosed("the lease was released")


def _frozen(table: PageIds) -> PageIds:
    view = table[:]
    view.flags.writeable = False
    return view
