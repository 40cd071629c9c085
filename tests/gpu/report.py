"""The table, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.gpu.checks import CheckResult

SHARES = ("of copy", "of product", "outside", "prefill", "decode")
"""Columns that are shares of one."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table `table`: figures by the names of their columns. note: what was not as it should be."""

    table: str
    name: str
    figures: dict[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """about: the machine and what ran on it. seconds: how long all took."""

    about: dict[str, str]
    checks: Sequence[CheckResult]
    rows: Sequence[Row]
    seconds: float

    @property
    def failed(self) -> list[CheckResult]:
        return [check for check in self.checks if check.outcome == "failed"]

    @property
    def left_out(self) -> list[CheckResult]:
        return [check for check in self.checks if check.outcome == "left out"]

    @property
    def exit_code(self) -> int:
        """0: every check passed. 1: one failed. 3: none did, and some were left out."""
        if self.failed:
            return 1
        return 3 if self.left_out or not self.checks else 0

    def markdown(self) -> str:
        parts = ["# chatd on a GPU", *_about(self.about), _checks(self.checks)]
        tables = dict.fromkeys(row.table for row in self.rows)
        parts += [_table(name, [row for row in self.rows if row.table == name]) for name in tables]
        return "\n\n".join([*parts, f"All of it took {self.seconds:.0f} s."])

    def write_json(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        plain = {
            "about": self.about,
            "checks": [asdict(check) for check in self.checks],
            "rows": [asdict(row) for row in self.rows],
            "seconds": self.seconds,
            "exit_code": self.exit_code,
        }
        path.write_text(json.dumps(plain, indent=2) + "\n")


def shown(column: str, value: float | None) -> str:
    """Shares in percent, all others with three digits."""
    if value is None:
        return ""
    if column in SHARES:
        return f"{100 * value:.0f} %"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _about(about: dict[str, str]) -> list[str]:
    return ["\n".join(f"- {name}: {value}" for name, value in about.items())]


def _checks(checks: Sequence[CheckResult]) -> str:
    counts = Counter(check.outcome for check in checks)
    line = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "left out"))
    taken = sum(check.seconds for check in checks)
    lines = [f"## Checks: {line} ({taken:.0f} s)"]
    failed = [f"- failed: {check.name}: {check.detail}" for check in checks if check.outcome == "failed"]
    missing = Counter(check.detail for check in checks if check.outcome == "left out")
    lines += ["\n".join([*failed, *(f"- left out: {count}, {detail}" for detail, count in missing.items())])]
    return "\n\n".join(line for line in lines if line)


def _table(name: str, rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row.figures))
    noted = any(row.note for row in rows)
    heads = ["", *columns, *(["note"] if noted else [])]
    lines = [f"## {name[0].upper()}{name[1:]}", "", _line(heads), _line(["---"] * len(heads))]
    for row in rows:
        cells = [shown(column, row.figures.get(column)) for column in columns]
        lines.append(_line([row.name, *cells, *([row.note] if noted else [])]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
