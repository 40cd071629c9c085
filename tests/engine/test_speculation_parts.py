"""Looking up n-grams, the pace of guessing, verification, and the pages and tokens that drafts may have."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from engine.sampling import NoCandidate, Sampled
from engine.scheduler import StepPlan, StepRow
from engine.speculation import Ask, NgramDrafter, Speculator, verified
from engine.speculation.ngram import SIZES, NgramIndex
from engine.speculation.pace import Pace
from tests.engine.drafters import Knowing, right
from tests.engine.scheduler_rig import Rig, decoding


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


LOOKUPS = [
    ("nothing to look up", (1,), 4, []),
    ("a pair is too new", (1, 2), 4, []),
    ("nothing seen before", (1, 2, 3, 4, 5), 4, []),
    ("a pair", (1, 2, 8, 9, 1, 2), 2, [8, 9]),
    ("one token is not enough", (1, 8, 9, 1), 2, []),
    ("the last of several", (1, 2, 8, 1, 2, 9, 1, 2), 1, [9]),
    ("the longest before the last", (5, 1, 2, 8, 6, 1, 2, 9, 5, 1, 2), 1, [8]),
    ("four before three", (4, 5, 1, 2, 7, 3, 5, 1, 2, 8, 4, 5, 1, 2), 1, [7]),
    ("up to its own end", (1, 2, 3, 1, 2), 2, [3, 1]),
    ("a loop goes on", (1, 2, 3, 1, 2), 7, [3, 1, 2, 3, 1, 2, 3]),
    ("one token again and again", (7, 7, 7), 3, [7, 7, 7]),
]


@pytest.mark.parametrize(("ids", "at_most", "expected"), [case[1:] for case in LOOKUPS], ids=[c[0] for c in LOOKUPS])
def test_look_ups(ids: tuple[int, ...], at_most: int, expected: list[int]) -> None:
    assert NgramIndex().follow(tokens(*ids), at_most) == expected


def slow_follow(ids: list[int], at_most: int) -> list[int]:
    """The definition, by comparing everything with everything."""
    for size in SIZES:
        for start in reversed(range(len(ids) - size)):
            if ids[start : start + size] == ids[-size:]:
                text = list(ids)
                for place in range(at_most):
                    text.append(text[start + size + place])
                return text[len(ids) :]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_an_index_that_grows_finds_what_the_definition_finds(seed: int) -> None:
    chance = random.Random(seed)
    ids = [chance.randrange(2 + seed % 5) for _ in range(chance.randint(1, 30))]
    drafter = NgramDrafter()
    for _ in range(40):
        ids += [chance.randrange(2 + seed % 5) for _ in range(chance.choice((1, 1, 1, 2, 5)))]
        ask = Ask(seed, tokens(*ids), chance.randint(1, 6), capacity=1000)
        assert drafter.propose([ask]) == [slow_follow(ids, ask.at_most)]


def test_a_token_is_entered_once_however_long_the_prompt() -> None:
    index, text = NgramIndex(), np.random.default_rng(0).integers(0, 50_000, 5_000).astype(np.int32)
    index.follow(text[:4_000], 4)
    for length in range(4_001, 4_100):
        before = sum(map(len, index._behind.values()))
        index.follow(text[:length], 4)
        assert sum(map(len, index._behind.values())) - before <= len(SIZES)


def test_sequences_do_not_mix_and_are_forgotten() -> None:
    drafter = NgramDrafter()
    one, other = tokens(1, 2, 3, 1, 2), tokens(1, 2, 4, 1, 2)
    assert drafter.propose([Ask(1, one, 1, 9), Ask(2, other, 1, 9)]) == [[3], [4]]
    drafter.drop(1)
    drafter.drop(77)
    assert drafter.propose([Ask(1, tokens(8, 9), 1, 9), Ask(2, other, 1, 9)]) == [[], [4]]


@pytest.mark.parametrize(
    ("drafts", "sampled", "kept"),
    [
        ((), [5], [False]),
        ((5, 6, 7), [5, 6, 7, 8], [True, True, True, False]),
        ((5, 6, 7), [5, 9], [True, False]),
        ((5, 6, 7), [9], [False]),
        ((5, 6), [5, None], [True, False]),
    ],
)
def test_drafts_are_kept_up_to_the_first_that_differs(
    drafts: tuple[int, ...], sampled: list[int | None], kept: list[bool]
) -> None:
    asked = []

    def choose(place: int) -> Sampled | NoCandidate:
        asked.append(place)
        token = sampled[place]
        return NoCandidate("none") if token is None else Sampled(token)

    outcomes = list(verified(drafts, choose))
    assert [outcome.token if isinstance(outcome, Sampled) else None for outcome, _ in outcomes] == sampled
    assert [is_draft for _, is_draft in outcomes] == kept
    assert asked == list(range(len(sampled)))


def test_a_reader_that_stops_samples_nothing_more() -> None:
    asked: list[int] = []
    for _ in verified((5, 6), lambda place: asked.append(place) or Sampled(5)):
        break
    assert asked == [0]


def paced(pace: Pace, right_share: float, length: int, seed: int = 0) -> tuple[int, int, int]:
    """Steps, drafts and kept drafts of a text in which each guess is right with some probability."""
    chance, generated, steps, drafted, kept = random.Random(seed), 1, 0, 0, 0
    while generated < length:
        wanted = pace.wanted(generated)
        hits = 0
        while hits < wanted and chance.random() < right_share:
            hits += 1
        generated += 1 + hits
        steps, drafted, kept = steps + 1, drafted + wanted, kept + hits
        if wanted:
            pace.went(wanted, hits, generated)
    return steps, drafted, kept


def test_the_pace_follows_what_is_kept() -> None:
    assert paced(Pace(4, 0.2), 1.0, 1_000)[0] <= 1_000 / 5 + 5
    _, drafted, _ = paced(Pace(4, 0.2), 0.0, 1_000)
    assert drafted <= 1_000 / 64 + 16
    steps, drafted, kept = paced(Pace(4, 0.2), 0.6, 1_000)
    assert steps < 600
    assert kept > drafted / 3


def test_a_text_that_becomes_predictable_is_guessed_again() -> None:
    pace = Pace(4, 0.2)
    paced(pace, 0.0, 500)
    generated = 500
    while pace.wanted(generated) < 4:
        if wanted := pace.wanted(generated):
            pace.went(wanted, wanted, generated + 1 + wanted)
        generated += 1 + wanted
        assert generated < 600


def test_never_more_than_asked_for() -> None:
    for most in (1, 2, 7):
        pace = Pace(most, 0.2)
        for step in range(100):
            wanted = pace.wanted(step)
            assert 0 <= wanted <= most
            if wanted:
                pace.went(wanted, wanted if step < 50 else 0, step)


def test_drafts_have_free_pages_only() -> None:
    rig = Rig(pages=10, page_size=2)
    sequence = decoding(rig, 4, 100)  # 5 tokens: 3 pages, one place free in the last
    other = decoding(rig, 4, 100)
    for asked, room in ((1, 1), (3, 3), (50, 5)):
        free = rig.cache.usage.free
        granted = rig.scheduler.reserve_ahead(sequence, asked)
        assert granted <= room
        assert rig.cache.usage.free >= min(free, 2), "a page is left for each of the two"
    assert sequence.lease is not None
    assert len(sequence.lease.pages) * 2 >= sequence.num_tokens
    rig.abort(other)
    rig.abort(sequence)
    assert rig.scheduler.reserve_ahead(sequence, 4) == 0


def test_drafts_evict_nothing() -> None:
    rig = Rig(pages=16, page_size=1)
    rig.add(10, 1)
    rig.run()
    cached = rig.cache.usage.evictable
    sequence = decoding(rig, 3, 100)
    evicted = rig.cache.stats.evicted_pages
    rig.scheduler.reserve_ahead(sequence, 50)
    assert rig.cache.usage.evictable == cached
    assert rig.cache.stats.evicted_pages == evicted


def speculated(rig: Rig, speculator: Speculator, knowing: Knowing) -> tuple[StepPlan, list[int]]:
    """The next step, and how many drafts each row has; then it is run, and no draft is kept."""
    for sequence in rig.live.values():
        knowing.knows(sequence.tokens[: sequence.num_tokens], range(50))
    plan = rig.scheduler.schedule()
    before = [(row.sequence.number, row.start, row.count) for row in plan.rows]
    speculator.extend(plan, rig.scheduler)
    assert [(row.sequence.number, row.start, row.known) for row in plan.rows] == before
    assert sum(row.count for row in plan.rows) <= rig.budget
    for row in plan.rows:
        assert row.sequence.lease is not None
        rig.model.run(replace(row, count=row.known), row.sequence.lease.pages)
        rig.scheduler.computed(row)
        if row.samples:
            rig._sample(row.sequence)
    return plan, [len(row.drafts) for row in plan.rows]


def test_drafts_delay_no_prefill() -> None:
    """A step that computes a prompt, or its first token, has none."""
    rig, knowing = Rig(pages=200, page_size=4, budget=16), Knowing(right)
    speculator = Speculator(knowing, 8)
    decoding(rig, 4, 100)
    assert speculated(rig, speculator, knowing)[1] == [3]
    rig.add(30, 10)
    drafted = [speculated(rig, speculator, knowing)[1] for _ in range(3)]
    assert drafted == [[0, 0], [0, 0], [3, 3]]


@pytest.mark.parametrize(
    ("running", "most", "budget", "expected"),
    [
        (1, 3, 64, [3]),
        (1, 1, 64, [1]),
        (2, 3, 64, [1, 1]),
        (2, 4, 64, [2, 1]),
        (3, 3, 64, [1, 0, 0]),
        (4, 3, 64, [0, 0, 0, 0]),
        (2, 64, 64, [3, 3]),
        (2, 64, 5, [2, 1]),
        (2, 64, 2, [0, 0]),
    ],
)
def test_sequences_share_the_drafts_of_a_step(running: int, most: int, budget: int, expected: list[int]) -> None:
    rig, knowing = Rig(pages=200, page_size=4, budget=budget), Knowing(right)
    for _ in range(running):
        decoding(rig, 4, 100)
    assert speculated(rig, Speculator(knowing, most), knowing)[1] == expected


def test_what_is_computed_once_more_has_no_drafts() -> None:
    """After a preemption, a sequence that has sampled is in prefill again, and a chunk may be a single token."""
    rig, knowing = Rig(pages=200, page_size=4, budget=64), Knowing(right)
    sequence = decoding(rig, 8, 100)
    sequence.computed -= 4
    knowing.knows(sequence.tokens[: sequence.num_tokens], range(50))
    plan = StepPlan([StepRow.next(sequence, 1)], spare=63)
    Speculator(knowing, 3).extend(plan, rig.scheduler)
    assert not plan.rows[0].drafts
    sequence.computed += 4
    plan = StepPlan([StepRow.next(sequence, 1)], spare=63)
    Speculator(knowing, 3).extend(plan, rig.scheduler)
    assert len(plan.rows[0].drafts) == 3
