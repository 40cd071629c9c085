"""Caches that are wrong on purpose: the random walk must notice each of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from cache import CacheError
from cache.lease import Lease
from cache.ledger import Ledger
from cache.policies import HeapPolicy
from cache.pool import PagePool
from cache.tree import PrefixTree
from tests.cache.test_against_model import CacheWalk

WALK = settings(
    max_examples=300, stateful_step_count=60, deadline=None, derandomize=True, database=None, phases=[Phase.generate]
)


def stamp_the_whole_node(patch):
    """A match inside a node stamps its rest as well."""
    settle = PrefixTree.settle

    def wrong(tree, walk):
        node, found = settle(tree, walk)
        if walk.inside is not None:
            walk.inside.stamp = next(tree._warm_stamps)
        return node, found

    patch.setattr(PrefixTree, "settle", wrong)


def stamp_nothing(patch):
    patch.setattr(PrefixTree, "touch", lambda tree, nodes, holder: None)


def free_duplicates_before_the_rewrite(patch):
    """The duplicates go back while the lease's table still names them."""
    rewrite, freed = Lease._rewrite, []

    def wrong(lease, start, pages):
        number = len(pages) // 4
        old = lease._pages[start : start + number].copy()
        lease._ledger.pool.free(old)
        freed.append(old)
        rewrite(lease, start, pages)

    free = PagePool.free

    def once(pool, pages):
        if any(np.array_equal(old, pages) for old in freed):
            freed.clear()
        else:
            free(pool, pages)

    patch.setattr(Lease, "_rewrite", wrong)
    patch.setattr(PagePool, "free", once)


def keep_the_duplicates(patch):
    patch.setattr(Lease, "_rewrite", lambda lease, start, pages: None)


def lock_the_last_node_only(patch):
    lock = PrefixTree.lock
    patch.setattr(PrefixTree, "lock", lambda tree, nodes, holder: lock(tree, nodes[-1:], holder))


def lock_the_parent_only(patch):
    lock = PrefixTree.lock
    patch.setattr(PrefixTree, "lock", lambda tree, nodes, holder: lock(tree, nodes[:-1], holder))


def evict_whole_nodes(patch):
    trim = PrefixTree.trim

    def wrong(tree, n_pages):
        node = tree.policy.victim()
        return trim(tree, max(n_pages, len(node.pages)) if node is not None and n_pages else n_pages)

    patch.setattr(PrefixTree, "trim", wrong)


def evict_one_too_many(patch):
    evict = Ledger.evict
    patch.setattr(Ledger, "evict", lambda ledger, n_pages: evict(ledger, n_pages + 1))


def evict_the_most_recent(patch):
    init = HeapPolicy.__init__
    patch.setattr(HeapPolicy, "__init__", lambda policy, key: init(policy, lambda node: -node.stamp))


def forget_to_lock_the_upper_half(patch):
    split = PrefixTree._split

    def wrong(tree, node, n_pages):
        upper = split(tree, node, n_pages)
        upper.locks = 0
        return upper

    patch.setattr(PrefixTree, "_split", wrong)


def close_what_others_use(patch):
    patch.setattr(PrefixTree, "_disown", lambda tree, node: None)


@pytest.mark.parametrize(
    "mutate",
    [
        stamp_the_whole_node,
        stamp_nothing,
        free_duplicates_before_the_rewrite,
        keep_the_duplicates,
        lock_the_last_node_only,
        lock_the_parent_only,
        evict_whole_nodes,
        evict_one_too_many,
        evict_the_most_recent,
        forget_to_lock_the_upper_half,
        close_what_others_use,
    ],
)
def test_the_walk_notices(mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, CacheError)):
        run_state_machine_as_test(CacheWalk, settings=WALK)


def test_the_right_cache_passes():
    run_state_machine_as_test(CacheWalk, settings=settings(WALK, max_examples=20))
