"""Requests that begin alike compute what they share once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.scheduler import StepPlan
from engine.scheduling.twins import Hold
from tests.engine.scheduler_rig import Rig, ids


def test_twins_compute_what_they_share_once() -> None:
    rig = Rig(pages=256, budget=32)
    twins = [rig.add(np.concatenate((ids(200), ids(9, start=1000 * i)))) for i in range(1, 7)]
    rig.run()
    assert rig.model.tokens == 200 + 6 * 9
    assert [s.cached_tokens for s in twins] == [0] + [200] * 5


def test_a_twin_holds_no_pages_while_it_waits_and_others_pass() -> None:
    rig = Rig(pages=256, budget=32)
    first, second = rig.add(ids(200)), rig.add(ids(200))
    rig.step()
    other = rig.add(8)
    rig.step()
    assert other.number in rig.ended
    assert (second.lease, second.admitted) == (None, None)
    while first.number in rig.live:
        assert second.lease is None or first.computed == 196
        rig.step()
    rig.run()
    assert rig.model.tokens == 200 + 8 + 4


def test_a_twin_that_shares_a_part_waits_for_that_part_only() -> None:
    rig = Rig(pages=256, budget=32)
    rig.add(ids(320))
    rig.step()
    second = rig.add(np.concatenate((ids(64), ids(8, start=900))))
    for _ in range(2):
        rig.step()
    assert second.number in rig.ended
    assert second.cached_tokens == 64


@pytest.mark.parametrize("how", ["aborted", "preempted"])
def test_a_twin_goes_on_when_the_first_does_not(how: str) -> None:
    rig = Rig(pages=64, budget=16)
    first, second = rig.add(ids(150), priority=0), rig.add(ids(150), priority=0)
    for _ in range(3):
        rig.step()
    assert second.lease is None
    if how == "aborted":
        rig.abort(first)
    else:
        rig.scheduler._preempt(StepPlan(), first)
    rig.step()
    assert (first.lease is None, second.lease is None) == ((True, False) if how == "aborted" else (False, True))
    rig.run()
    assert rig.model.tokens <= 150 + 16


def test_a_hold_lasts_while_the_first_moves() -> None:
    rig = Rig(pages=256, budget=32)
    first = rig.add(ids(200))
    rig.step()
    hold = Hold(first, 100)
    assert hold.lasts({first})
    assert not hold.lasts(set())
    assert not Hold(first, 32).lasts({first})
    rig.abort(first)
    assert not hold.lasts({first})


def test_prompts_that_begin_differently_are_no_twins() -> None:
    """Though the page that the second needs next is one that the first computes, at the same place."""
    rig = Rig(pages=256, budget=32, page_size=4)
    rig.add(ids(5))
    rig.run()
    rig.add(np.concatenate((ids(4, start=50), ids(100, start=500))))
    rig.step()
    second = rig.add(np.concatenate((ids(4), ids(8, start=500))))
    rig.step()
    assert second.cached_tokens == 4
    assert second.number in rig.ended


NO_TWINS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("namespaces differ", {"namespace": "a"}, {"namespace": "b"}),
    ("adapters differ", {"adapter": "a"}, {"adapter": "b"}),
    ("the first leaves nothing", {"use_cache": False}, {}),
    ("the second looks nothing up", {}, {"use_cache": False}),
    ("the first is background work", {"priority": -1}, {}),
]


@pytest.mark.parametrize(("name", "one", "two"), NO_TWINS, ids=[name for name, *_ in NO_TWINS])
def test_who_is_no_twin(name: str, one: dict[str, Any], two: dict[str, Any]) -> None:
    rig = Rig(pages=256, budget=64, max_long_prefills=2)
    rig.add(ids(200), **one)
    rig.step()
    second = rig.add(ids(200), **two)
    rig.step()
    assert second.lease is not None


@pytest.mark.parametrize(("shared", "together"), [(0, True), (3, True), (4, False), (5, False), (8, False)])
def test_only_a_whole_page_is_worth_waiting_for(shared: int, together: bool) -> None:
    rig = Rig(budget=32, page_size=4)
    for start in (700, 800):
        rig.add(np.concatenate((ids(shared), ids(3, start))))
    assert len(rig.step().admitted) == 1 + together
    rig.run()
    assert rig.model.tokens == 2 * (shared + 3) - (0 if together else shared // 4 * 4)
