"""`make test-gpu` from its first line to its exit code, on the CPU with a tiny model, as if it were a card."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from engine.attention.paged_kv import PagedKV
from tests.gpu import __main__ as entry
from tests.gpu.checks import all_checks
from tests.gpu.costs import Shape
from tests.gpu.device import Host
from tests.gpu.loads import Load
from tests.gpu.measure import all_measurements, measure_card
from tests.gpu.test_checks import SMALL
from tests.support import flashinfer_standin

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=64, inner=96, vocabulary=1024)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the figures go; all is made small, and no kernel of FlashInfer is compiled."""
    flashinfer_standin.install(monkeypatch, exact=False)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setattr(entry, "find_device", Host)
    monkeypatch.setattr(entry, "backends_there", lambda: ("flashinfer", "torch-paged"))
    monkeypatch.setattr(entry, "_compile", lambda *given: None)
    monkeypatch.setattr(entry, "all_checks", lambda device, backends: all_checks(device, backends, [SMALL])[::5])
    monkeypatch.setattr(entry, "Shape", lambda: TINY)
    monkeypatch.setattr(entry, "measure_card", partial(measure_card, size=1 << 12, product=32, repeats=1))
    small = {
        "batches": (2,),
        "contexts": (9,),
        "prompt": 17,
        "loads": [Load("a load", 9, 3, 1.0, rows=2)],
        "shared": [16],
    }
    monkeypatch.setattr(entry, "all_measurements", partial(all_measurements, **small))
    monkeypatch.setattr("tests.gpu.measure._STEPS", 2)
    monkeypatch.setattr("tests.gpu.sampling.VOCABULARY", 3000)
    return tmp_path / "report.json"


def test_all_of_it(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["--json", str(report)]) == 0
    shown = capsys.readouterr().out
    for part in (
        "- device: CPU",
        "0 failed, 0 left out",
        "## Decode",
        "## Prefill",
        "## Loads",
        "## Decode, shared tokens",
        "## Backends",
        "s.",
    ):
        assert part in shown
    written = json.loads(report.read_text())
    assert written["exit_code"] == 0
    assert {row["note"] for row in written["rows"]} == {""}
    assert len(written["rows"]) == 1 + 2 + 1 + 2 + 2 * 2 + 2 + 1
    assert written["checks"][0]["name"] == "products: int8 weights, bfloat16"
    assert written["about"]["model"].startswith("random weights in bfloat16, 2 layers (2 with weights of their own)")


def test_checks_alone(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["--json", str(report), "--checks-only"]) == 0
    assert "## Decode" not in capsys.readouterr().out


def test_without_time_it_says_so_and_is_not_killed(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["--json", str(report), "--seconds", "0"]) == 3
    assert "no time left" in capsys.readouterr().out


def test_what_is_wrong_is_told(
    report: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PagedKV, "clear", lambda self, pages: None)
    assert entry.main(["--json", str(report)]) == 1
    assert "- failed: flashinfer: bfloat16, heads of 64" in capsys.readouterr().out
