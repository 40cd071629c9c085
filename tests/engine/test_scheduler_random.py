"""Thousands of random requests in small pools: all end, no page is lost, and nobody waits beyond the bounds."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from engine.scheduling.waiting import OVERTAKEN
from tests.engine.scheduler_rig import Rig

SHAPES = [
    # pages, page_size, budget, max_running, max_long_prefills
    (24, 4, 16, 4, 1),
    (40, 1, 8, 8, 1),
    (12, 16, 64, 6, 2),
    (200, 2, 32, 16, 1),
    (64, 4, 5, 5, 3),
    (9, 8, 1, 1, 1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ahead", [False, True])
def test_random_traffic(shape: tuple[int, ...], seed: int, ahead: bool) -> None:
    pages, page_size, budget, max_running, max_long = shape
    rig = Rig(pages, page_size, budget, max_running, max_long, ahead=ahead)
    random = Random(seed)
    capacity = pages * page_size
    stems = [np.arange(start, start + capacity, dtype=np.int32) for start in (0, 1000, 2000)]
    aborted, expected = set(), {}
    left = 250
    while left or rig.live:
        if left and random.random() < (0.9 if len(rig.live) < 5 else 0.2):
            left -= 1
            length = random.randint(1, capacity - 1 if random.random() < 0.1 else max(1, capacity // 4))
            prompt = random.choice(stems)[:length].copy()
            prompt[random.randrange(length) :] += random.choice((0, 0, 1, 2))
            sequence = rig.add(
                prompt,
                random.choice((0, 1, 3, 10, None if random.random() < 0.1 else 5)),
                namespace=random.choice(("", "", "other")),
                owner=random.choice((None, "a", "b", "c")),
                tenant=random.choice(("", "x", "y")),
                priority=random.choice((0, 0, 0, 1, -1)),
                use_cache=random.random() < 0.9,
            )
            expected[sequence.number] = sequence
        if rig.live and random.random() < 0.03:
            sequence = random.choice(list(rig.live.values()))
            aborted.add(sequence.number)
            rig.abort(sequence)
        rig.step()
        if rig.steps % 16 == 0:
            rig.cache.check()
        for entry in rig.scheduler._waiting:
            assert entry.overtaken <= OVERTAKEN + max_running
    rig.run()
    assert len(rig.ended) == 250
    for number, sequence in expected.items():
        reason = rig.ended[number]
        assert (reason == "cancelled") == (number in aborted)
        if reason == "no_room":
            assert sequence.background
        if reason == "length":
            alone_in_a_full_pool = sequence.background or sequence.capacity == capacity
            assert sequence.full or alone_in_a_full_pool
    assert rig.cache.stats.lookups == len(rig.order)
