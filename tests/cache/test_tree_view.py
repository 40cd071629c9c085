"""Copies of the tree."""

from __future__ import annotations

import pytest

from cache import PagePool, PrefixCache


@pytest.fixture
def cache(store) -> PrefixCache:
    cache = PrefixCache(PagePool(40, 1))
    for last in range(5):
        store(cache, [1, 2, last], owner=f"s{last}")
    store(cache, [9], namespace="b")
    return cache


def test_the_whole_tree_in_small(cache):
    top = cache.tree(depth=9)
    assert [(root.namespace, root.hidden_children) for root in top.children] == [("", 0), ("b", 0)]
    (trunk,) = top.children[0].children
    assert (trunk.n_pages, trunk.first_tokens, trunk.owner, trunk.hits) == (2, (1, 2), None, 4)
    assert [(leaf.first_tokens, leaf.owner) for leaf in trunk.children] == [((n,), f"s{n}") for n in range(5)]


@pytest.mark.parametrize(("depth", "limit", "hidden"), [(0, 100, 2), (1, 100, 0), (1, 1, 1)])
def test_what_is_left_out_is_told(cache, depth, limit, hidden):
    assert cache.tree(depth=depth, limit=limit).hidden_children == hidden


def test_a_node_is_asked_for_by_its_id(cache):
    root = cache.tree().children[0]
    trunk = cache.tree(root.id, depth=1).children[0]
    part = cache.tree(trunk.id, depth=1, limit=4)
    assert (len(part.children), part.hidden_children) == (3, 2)
    cache.reset()
    assert cache.tree(trunk.id) is None


def test_a_node_tells_its_size_age_and_sessions(store):
    now = [10.0]
    cache = PrefixCache(PagePool(40, 2), clock=lambda: now[0])
    store(cache, [1, 2, 3, 4, 5, 6], owner="ann")
    store(cache, [1, 2, 7, 8], owner="bob")
    store(cache, [1, 2, 7, 8, 9, 9], owner="bob")
    now[0] = 15.0
    store(cache, [1, 2, 7, 8], owner="bob")
    cache.pin("bob", [1, 2], seconds=60)
    now[0] = 17.5
    top = cache.tree(depth=9)
    (trunk,) = top.children[0].children
    (answer,) = trunk.children[1].children
    assert [(node.n_tokens, node.n_pages, node.subtree_pages, node.sessions) for node in (top, trunk, answer)] == [
        (0, 0, 5, 2),
        (2, 1, 5, 2),
        (2, 1, 1, 1),
    ]
    assert [(node.pinned, node.locks) for node in (trunk, answer)] == [(True, 1), (False, 0)]
    assert [node.idle_seconds for node in (trunk, answer)] == [2.5, 7.5]
    assert cache.tree(trunk.id, depth=0).subtree_pages == 5


def test_a_held_node_shows_its_leases(cache):
    lease = cache.acquire([1, 2, 3])
    trunk = cache.tree().children[0].children[0]
    assert trunk.locks == 1
    lease.release()
    assert trunk.locks == 1
    assert cache.tree().children[0].children[0].locks == 0
