"""How the tokens of a step are shared: streams first, then prompts in chunks, and no long prompt starves."""

from __future__ import annotations

import pytest

from tests.engine.scheduler_rig import Rig, counts, decoding


def test_a_stream_moves_in_every_step_beside_a_prompt_of_twenty_chunks() -> None:
    rig = Rig(pages=256, budget=32)
    stream = decoding(rig)
    prompt = rig.add(20 * 32)
    steps = 0
    while prompt.number in rig.live:
        taken = counts(rig.step())
        assert taken[stream.number] == 1
        assert taken[prompt.number] == min(31, 20 * 32 - 31 * steps)
        steps += 1
    assert steps == -(-20 * 32 // 31)


def test_decode_rows_come_first_and_all_of_them() -> None:
    rig = Rig(budget=8, max_running=8)
    streams = [decoding(rig) for _ in range(7)]
    prompt = rig.add(20)
    for done in range(3):
        plan = rig.step()
        assert [row.sequence for row in plan.rows] == [*streams, prompt]
        assert [row.count for row in plan.rows] == [1] * 8
        assert prompt.computed == done + 1


def test_several_short_prompts_share_one_step() -> None:
    rig = Rig(budget=32)
    first, second, third = (rig.add(n) for n in (10, 12, 14))
    assert counts(rig.step()) == {first.number: 10, second.number: 12, third.number: 10}
    assert counts(rig.step()) == {third.number: 4}


def test_a_short_prompt_passes_a_long_one() -> None:
    rig = Rig(pages=256, budget=32)
    long = rig.add(400)
    assert counts(rig.step()) == {long.number: 32}
    short = rig.add(16)
    assert counts(rig.step()) == {long.number: 16, short.number: 16}
    assert short.number in rig.ended


@pytest.mark.parametrize("length", [6, 12, 16, 40])
def test_a_long_prompt_is_not_starved_by_a_flow_of_others(length: int) -> None:
    """Alone it would take n = 20 steps. Others come in every step, up to four times what fits: it waits for those that
    came within n steps, and then takes at most 2 n."""
    rig = Rig(pages=512, budget=32, max_running=16)
    long = rig.add(640)
    while long.number in rig.live:
        rig.add(length)
        rig.add(length)
        rig.add(length)
        rig.step()
    assert long.admitted is not None
    assert long.admitted <= 20 * max(1, 3 * length / 32) + 1
    assert rig.steps - long.admitted <= 2 * 20 + 1


def test_one_long_prompt_at_a_time_and_short_ones_pass_the_next() -> None:
    rig = Rig(pages=512, budget=32)
    first, second = rig.add(300), rig.add(300)
    rig.step()
    short = rig.add(16)
    assert counts(rig.step()) == {first.number: 16, short.number: 16}
    while first.number in rig.live:
        assert second.lease is None or first.pending <= 16
        rig.step()
    rig.run()
    assert rig.order == [first.number, short.number, second.number]


def test_two_long_prompts_share_where_two_may() -> None:
    rig = Rig(pages=512, budget=32, max_long_prefills=2)
    first, second, third = rig.add(300), rig.add(300), rig.add(300)
    rig.step()
    assert counts(rig.step()) == {first.number: 16, second.number: 16}
    assert counts(rig.step()) == {first.number: 24, second.number: 8}
    assert third.lease is None
    rig.run()
