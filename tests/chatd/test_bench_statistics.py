"""Figures that are made of measured times."""

from __future__ import annotations

from itertools import pairwise

import pytest

from chatd.bench.client import Answer
from chatd.bench.report import table
from chatd.bench.scenarios import Stages, stages_of
from chatd.bench.statistics import Group, Spread, Summary, percentile


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([7.0], 0.95, 7.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0.95, 4.8),  # position 0.95 * 4 = 3.8
        ([float(n) for n in range(101)], 0.99, 99.0),
        ([1.0, 2.0], 0.0, 1.0),
        ([1.0, 2.0], 1.0, 2.0),
    ],
)
def test_percentiles_lie_between_the_two_nearest_values(
    values: list[float], share: float, expected: float | None
) -> None:
    assert percentile(values, share) == (None if expected is None else pytest.approx(expected))


def answer(prompt: int | None, cached: int | None, times: tuple[float, ...], tokens: int | None = None) -> Answer:
    """times: of the chunks; the stream ends a second later."""
    gaps = tuple(later - earlier for earlier, later in pairwise(times))
    return Answer("x", prompt, cached, tokens or len(times), times[0], times[-1], times[-1] + 1, gaps)


def test_a_summary_of_two_answers() -> None:
    summary = Summary.of([answer(100, 40, (1, 2, 4)), answer(300, 60, (3,))], wall_s=8)
    assert (summary.requests, summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (2, 400, 100, 4)
    assert (summary.requests_per_s, summary.output_tokens_per_s, summary.total_tokens_per_s) == (0.25, 0.5, 50.5)
    assert summary.hit_rate == 0.25
    assert summary.first_token_share == (1 + 3) / (5 + 4)
    assert summary.ttft == Spread(2, 2000.0, pytest.approx(2900), pytest.approx(2980))
    assert summary.tpot == Spread(1, 1500.0, 1500.0, 1500.0)
    assert summary.itl == Spread(2, 1500.0, pytest.approx(1950), pytest.approx(1990))
    assert summary.e2e.p50_ms == 4500.0


def test_what_a_server_does_not_tell_is_unknown() -> None:
    silent = Summary.of([answer(None, None, (1, 2)), answer(50, None, (1, 2))], wall_s=2)
    assert (silent.hit_rate, silent.cached_tokens, silent.prompt_tokens) == (None, None, 50)
    half = Summary.of([answer(50, None, (1, 2)), answer(80, 20, (1, 2))], wall_s=2)
    assert (half.hit_rate, half.cached_tokens) == (0.25, 20)
    group = Group.of([answer(None, None, (1,)), answer(50, 0, (3,))])
    assert (group.requests, group.mean_prompt_tokens, group.mean_cached_tokens) == (2, 50, 0)
    nothing = Summary.of([], wall_s=0)
    assert (nothing.requests_per_s, nothing.hit_rate, nothing.first_token_share, nothing.ttft.p50_ms) == (None,) * 4


METRICS = """
# TYPE chatd_queue_seconds histogram
chatd_queue_seconds_bucket{le="+Inf"} 2
chatd_queue_seconds_count 2
chatd_queue_seconds_sum 1.5
# TYPE chatd_prefill_seconds histogram
chatd_prefill_seconds_sum 3.25
# TYPE chatd_decode_seconds histogram
chatd_decode_seconds_sum 10
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (METRICS, Stages(1.5, 3.25, 10.0)),
        (METRICS.replace("chatd_decode", "other"), None),
        ("<html>", None),
        ("", None),
        (None, None),
    ],
)
def test_stages_are_read_from_metrics(text: str | None, expected: Stages | None) -> None:
    assert stages_of(text) == expected


def test_tables_are_markdown_and_aligned() -> None:
    assert table(("load", "n"), [("short", "1"), ("x", "1,000")]).splitlines() == [
        "| load  |     n |",
        "| ----- | ----: |",
        "| short |     1 |",
        "| x     | 1,000 |",
    ]
