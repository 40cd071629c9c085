"""Who enters next: priority, fair shares, what is cached, lateness, and the bound of every wait."""

from __future__ import annotations

import numpy as np
import pytest

from engine.scheduling.shares import HALVED_EVERY, Shares
from engine.sequence import Sequence
from tests.engine.scheduler_rig import Rig, decoding, ids


def order(rig: Rig, *sequences: Sequence) -> list[int]:
    """Indices into `sequences`, in the order of admission, with one place in the engine."""
    rig.run()
    numbers = [s.number for s in sequences]
    return [numbers.index(n) for n in rig.order if n in numbers]


@pytest.mark.parametrize(
    ("priorities", "expected"),
    [((0, 0, 0), [0, 1, 2]), ((-1, 0, 5), [2, 1, 0]), ((0, -2, -1), [0, 2, 1]), ((1, 1, 2), [2, 0, 1])],
)
def test_higher_priority_enters_first(priorities: tuple[int, ...], expected: list[int]) -> None:
    rig = Rig(max_running=1)
    decoding(rig, max_tokens=5, priority=9)
    assert order(rig, *(rig.add(8, priority=p) for p in priorities)) == expected


def test_the_longest_cached_prefix_enters_first() -> None:
    rig = Rig(max_running=1)
    rig.add(ids(32))
    rig.run()
    decoding(rig, max_tokens=4)
    waiting = [rig.add(ids(40, start=500)), rig.add(np.concatenate((ids(16), ids(24, 600)))), rig.add(ids(40))]
    assert order(rig, *waiting) == [2, 1, 0]


@pytest.mark.parametrize("length", [1, 4, 15, 16, 17, 40])
def test_a_look_up_says_what_admission_finds(length: int) -> None:
    rig = Rig()
    rig.add(ids(16))
    rig.run()
    sequence = rig.add(ids(length))
    expected = rig.scheduler._pages.match(sequence)
    rig.run()
    assert sequence.cached_tokens == expected


def test_a_prefix_that_was_evicted_meanwhile_counts_no_more() -> None:
    rig = Rig(max_running=1)
    rig.add(ids(32))
    rig.run()
    decoding(rig, max_tokens=4)
    waiting = [rig.add(ids(40, start=500)), rig.add(ids(40))]
    rig.cache.evict(64)
    assert order(rig, *waiting) == [0, 1]


def test_with_time_an_uncached_prompt_goes_before_cached_ones() -> None:
    """It is overtaken by equals only while they come within the steps that its own prompt takes: 64 / 16."""
    rig = Rig(pages=64, budget=16, max_running=1)
    rig.add(ids(80))
    rig.run()
    decoding(rig, max_tokens=40)
    old = rig.add(64)
    later = []
    for _ in range(12):
        later.append(rig.add(ids(81)))
        rig.step()
    assert order(rig, old, *later).index(0) in range(3, 6)


def test_tenants_share_the_engine_evenly() -> None:
    """A flood of one tenant does not hold up another, and neither do many sessions of one tenant."""
    rig = Rig(pages=512, budget=16, max_running=1)
    flood = [rig.add(64, tenant="flood", owner=f"session {i}") for i in range(60)]
    for _ in range(30):
        rig.step()
    modest = [rig.add(64, tenant="modest", owner="one session") for _ in range(6)]
    rig.run()
    places = [rig.order.index(s.number) for s in modest]
    started = sum(s.admitted < modest[0].arrived for s in flood)  # type: ignore[operator]
    assert places[-1] - started <= 2 * len(modest) + 2


def test_owners_of_one_tenant_share_evenly() -> None:
    rig = Rig(pages=512, budget=16, max_running=1)
    flood = [rig.add(64, owner="busy") for _ in range(40)]
    other = [rig.add(64, owner="quiet") for _ in range(4)]
    rig.run()
    assert max(rig.order.index(s.number) for s in other) < rig.order.index(flood[12].number)


def test_nobody_is_overtaken_by_more_than_64_later_ones() -> None:
    """New tenants for ever would always go first: what was overtaken 64 times goes before them."""
    rig = Rig(pages=64, budget=16, max_running=1)
    while rig.scheduler._shares.level("old", None)[0] < 2:
        rig.add(100, tenant="old")
        rig.run()
    decoding(rig, max_tokens=3)
    before = len(rig.order)
    old = rig.add(8, tenant="old")
    for number in range(200):
        rig.add(8, tenant=f"new {number}")
        rig.step()
    assert rig.order.index(old.number) - before == 64
    rig.run()


def test_what_was_served_long_ago_counts_no_more() -> None:
    shares = Shares(quantum=100)
    shares.charge("a", "x", 800)
    shares.charge("a", "y", 50)
    levels = [shares.level("a", "x")]
    for _ in range(4):
        for _ in range(HALVED_EVERY):
            shares.step()
        levels.append(shares.level("a", "x"))
    assert levels == [(8, 8), (4, 4), (2, 2), (1, 1), (0, 0)]
    assert shares.level("a", "y") == shares.level("b", None) == (0, 0)
