"""What a load benchmark found: Markdown for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from chatd.bench.client import Answer
from chatd.bench.histories import Curve
from chatd.bench.load import Load, Row, answers_of, errors_of, other_lengths
from chatd.bench.scenarios import Played
from chatd.bench.statistics import Group, Spread, Summary, ratio

_TIMES = (
    "TTFT: request sent to first text. TPOT: first text to last token, by the tokens after the first. ITL: between two "
    "chunks with text. Percentiles are interpolated linearly."
)
_STAGES = (
    "to first text: the share of the time of all answers until their first text, as the client saw it; decode is the "
    "rest. Waiting and prefill: what the server itself counted, of all three."
)


@dataclass(frozen=True, slots=True)
class Report:
    """rows: all requests. figures: what was made of them, for JSON. tables: in Markdown."""

    title: str
    rows: Sequence[Row]
    figures: dict[str, Any]
    tables: Sequence[str]
    notes: Sequence[str]

    def markdown(self, interrupted: bool = False) -> str:
        notes = [*_complaints(self.rows, interrupted), *self.notes, _TIMES]
        return "\n\n".join((self.title, *self.tables, "\n".join(f"- {note}" for note in notes))) + "\n"

    def json(self, interrupted: bool = False) -> str:
        """Everything but the texts."""
        head = {"title": self.title, "interrupted": interrupted, **self.figures, "errors": errors_of(self.rows)}
        return json.dumps({**head, "rows": [_row_json(row) for row in self.rows]}, indent=2) + "\n"


def conversations_report(title: str, load: Load) -> Report:
    answers, groups = answers_of(load.rows), _groups(load.rows, "turn")
    summary = Summary.of(answers, load.wall_s)
    late = Spread.of(answer.ttft_s for answer in answers_of([row for row in load.rows if row.labels["turn"] != 1]))
    totals = [
        ("output tokens/s", _number(summary.output_tokens_per_s)),
        ("TTFT from turn 2 on, p50 / p95, ms", _pair(late.p50_ms, late.p95_ms)),
        ("TPOT, p50 / p95, ms", _pair(summary.tpot.p50_ms, summary.tpot.p95_ms)),
        ("ITL, p50 / p99, ms", _pair(summary.itl.p50_ms, summary.itl.p99_ms)),
        ("whole answer, p50 / p95, ms", _pair(summary.e2e.p50_ms, summary.e2e.p95_ms)),
        ("hit rate", _share(summary.hit_rate)),
        ("answers", str(summary.requests)),
        ("errors", str(len(load.rows) - summary.requests)),
        ("seconds", _number(load.wall_s)),
    ]
    turns = [
        (
            str(turn),
            str(group.requests),
            _number(group.mean_prompt_tokens, 0),
            _number(group.mean_cached_tokens, 0),
            _number(group.ttft.p50_ms),
            _number(group.ttft.p95_ms),
            _number(group.tpot.p50_ms),
        )
        for turn, group in groups.items()
    ]
    return Report(
        title,
        load.rows,
        {
            "summary": {**asdict(summary), "late_ttft": asdict(late)},
            "turns": [{"turn": turn, **asdict(group)} for turn, group in groups.items()],
        },
        [
            table(("turn", "answers", "prompt", "cached", "TTFT p50, ms", "TTFT p95, ms", "TPOT p50, ms"), turns),
            table(("over all", ""), totals),
        ],
        ["prompt, cached: tokens, mean. hit rate: cached tokens of all prompt tokens."],
    )


def scenarios_report(title: str, played: Sequence[Played]) -> Report:
    found = [(each, Summary.of(answers_of(each.load.rows), each.load.wall_s)) for each in played]
    times = [
        (
            each.scenario.name,
            _range([answer.prompt_tokens for answer in answers_of(each.load.rows)]),
            _range([answer.output_tokens for answer in answers_of(each.load.rows)]),
            str(summary.requests),
            str(len(each.load.rows) - summary.requests),
            _pair(summary.ttft.p50_ms, summary.ttft.p95_ms),
            _pair(summary.tpot.p50_ms, summary.tpot.p95_ms),
            _pair(summary.itl.p50_ms, summary.itl.p99_ms),
        )
        for each, summary in found
    ]
    rates = [
        (
            each.scenario.name,
            _number(summary.requests_per_s, 2),
            _number(summary.output_tokens_per_s),
            _number(summary.total_tokens_per_s),
            _share(summary.hit_rate),
            _share(summary.first_token_share),
            *(_share(share) for share in _stage_shares(each)),
        )
        for each, summary in found
    ]
    return Report(
        title,
        [row for each in played for row in each.load.rows],
        {
            "scenarios": [
                {
                    **asdict(each.scenario),
                    "summary": asdict(summary),
                    "stages": None if each.stages is None else asdict(each.stages),
                }
                for each, summary in found
            ]
        },
        [
            table(
                (
                    "load",
                    "prompt",
                    "output",
                    "answers",
                    "errors",
                    "TTFT p50 / p95, ms",
                    "TPOT p50 / p95, ms",
                    "ITL p50 / p99, ms",
                ),
                times,
            ),
            table(
                (
                    "load",
                    "requests/s",
                    "output tokens/s",
                    "all tokens/s",
                    "hit rate",
                    "to first text",
                    "waiting",
                    "prefill",
                    "decode",
                ),
                rates,
            ),
        ],
        ["prompt, output: tokens of each request, as the server counts them.", _STAGES],
    )


def histories_report(title: str, curve: Curve) -> Report:
    points = [
        (
            str(point.history),
            _number(point.cached.mean_prompt_tokens, 0),
            _number(point.cached.mean_cached_tokens, 0),
            _pair(point.cached.ttft.p50_ms, point.cached.ttft.p95_ms),
            _pair(point.uncached.ttft.p50_ms, point.uncached.ttft.p95_ms),
            _number(ratio(point.uncached.ttft.p50_ms, point.cached.ttft.p50_ms), 2),
        )
        for point in curve.points
    ]
    return Report(
        title,
        curve.rows,
        {"points": [asdict(point) for point in curve.points]},
        [
            table(
                (
                    "history",
                    "prompt",
                    "cached",
                    "TTFT with cache, p50 / p95, ms",
                    "TTFT without, p50 / p95, ms",
                    "ratio of p50",
                ),
                points,
            )
        ],
        ["history: tokens before the new message. prompt, cached: tokens of the measured turn, mean, with the cache."],
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown that is also aligned as plain text: the first column to the left, the others to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    first, *others = widths
    lines.insert(1, ["-" * first, *("-" * (width - 1) + ":" for width in others)])
    return "\n".join(f"| {' | '.join([line[0].ljust(first), *map(str.rjust, line[1:], others)])} |" for line in lines)


def _complaints(rows: Sequence[Row], interrupted: bool) -> list[str]:
    """What a reader must know before any figure."""
    found = ["Interrupted: these are the answers that were whole by then."] if interrupted else []
    found += [f"{count} of {len(rows)} requests failed: {text}" for text, count in errors_of(rows).most_common()]
    if others := other_lengths(rows):
        found.append(
            f"{len(others)} of {len(answers_of(rows))} answers did not get the length that was asked for, but "
            f"{_range(others)} tokens: the server does not heed ignore_eos and min_tokens."
        )
    return found


def _groups(rows: Sequence[Row], label: str) -> dict[int, Group]:
    kinds = sorted({int(row.labels[label]) for row in rows})
    return {kind: Group.of(answers_of([row for row in rows if row.labels[label] == kind])) for kind in kinds}


def _stage_shares(played: Played) -> tuple[float | None, float | None, float | None]:
    stages = played.stages
    if stages is None:
        return None, None, None
    whole = stages.queue_s + stages.prefill_s + stages.decode_s
    return ratio(stages.queue_s, whole), ratio(stages.prefill_s, whole), ratio(stages.decode_s, whole)


def _row_json(row: Row) -> dict[str, Any]:
    outcome = row.outcome
    if not isinstance(outcome, Answer):
        return {**row.labels, "error": str(outcome)}
    return {
        **row.labels,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "output_tokens": outcome.output_tokens,
        "ttft_ms": 1000 * outcome.ttft_s,
        "tpot_ms": None if outcome.tpot_s is None else 1000 * outcome.tpot_s,
        "e2e_ms": 1000 * outcome.e2e_s,
        "itl_ms": [1000 * gap for gap in outcome.itl_s],
    }


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _pair(first: float | None, second: float | None) -> str:
    return f"{_number(first)} / {_number(second)}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _range(values: Sequence[int | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return f"{min(known)}" if min(known) == max(known) else f"{min(known)} to {max(known)}"
