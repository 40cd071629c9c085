"""The table, its file, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.checks import CheckResult
from tests.gpu.report import Report, Row, shown

PASSED = CheckResult("torch-paged: a", "passed", "", 1.5)
FAILED = CheckResult("flashinfer: b", "failed", "AssertionError: not close", 2.0)
LEFT_OUT = CheckResult("flashinfer: c", "left out", "no time left", 0.0)
ROWS = [
    Row("decode", "1 x 128", {"ms": 4.123, "of copy": 0.724}),
    Row("decode", "64 x 16,384", note="failed: MemoryError: too large"),
    Row("prefill", "2,048 tokens", {"TFLOP/s": 412.4}),
]


@pytest.mark.parametrize(
    ("checks", "code"),
    [
        ([PASSED], 0),
        ([PASSED, FAILED], 1),
        ([PASSED, LEFT_OUT], 3),
        ([FAILED, LEFT_OUT], 1),
        ([], 3),
    ],
)
def test_exit_codes(checks: list[CheckResult], code: int) -> None:
    assert Report({}, checks, [], 1.0).exit_code == code


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [("ms", 4.1234, "4.12"), ("of copy", 0.724, "72 %"), ("tokens/s", 15321.4, "15,321"), ("ms", None, "")],
)
def test_figures(column: str, value: float | None, text: str) -> None:
    assert shown(column, value) == text


def test_the_table() -> None:
    report = Report({"device": "a card"}, [PASSED, FAILED, LEFT_OUT, LEFT_OUT], ROWS, 77.7)
    assert report.markdown() == (
        "# chatd on a GPU\n\n"
        "- device: a card\n\n"
        "## Checks: 1 passed, 1 failed, 2 left out (4 s)\n\n"
        "- failed: flashinfer: b: AssertionError: not close\n"
        "- left out: 2, no time left\n\n"
        "## Decode\n\n"
        "|  | ms | of copy | note |\n"
        "| --- | --- | --- | --- |\n"
        "| 1 x 128 | 4.12 | 72 % |  |\n"
        "| 64 x 16,384 |  |  | failed: MemoryError: too large |\n\n"
        "## Prefill\n\n"
        "|  | TFLOP/s |\n"
        "| --- | --- |\n"
        "| 2,048 tokens | 412 |\n\n"
        "All of it took 78 s."
    )


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    Report({"device": "a card"}, [PASSED], ROWS, 3.0).write_json(path)
    written = json.loads(path.read_text())
    assert written["rows"][0] == {
        "table": "decode",
        "name": "1 x 128",
        "figures": {"ms": 4.123, "of copy": 0.724},
        "note": "",
    }
    assert (written["exit_code"], written["checks"][0]["name"]) == (0, "torch-paged: a")
