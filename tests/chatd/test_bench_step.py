"""chatd bench step: the parts of a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chatd.bench.step import PARTS, StepShape, measure_steps
from chatd.cli import main
from chatd.failure import CommandFailed
from engine.config import EngineConfig
from tests.support.tiny_models import save_tiny


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, "llama")
    return folder


def test_a_shape_is_read_from_text() -> None:
    assert StepShape.parse("4x400x1") == StepShape(4, 400, 1)
    assert str(StepShape(4, 400, 1)) == "4x400x1"


@pytest.mark.parametrize("text", ["", "4x400", "0x400x1", "4x-1x1", "4x400x0", "4x400x1x1", "axbxc"])
def test_what_is_no_shape_is_told_in_one_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", text]) == 1
    assert capsys.readouterr().err.strip().endswith("a step is SEQUENCESxCONTEXTxNEW, such as 4x400x1")


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_every_part_of_a_step_is_measured(dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    config = EngineConfig(model=str(tiny_model), models_dir=tmp_path, dtype=dtype)
    shapes = [StepShape(3, 20, 1), StepShape(1, 0, 30)]
    times = list(measure_steps(config, shapes, repeat=5))
    assert [time.shape for time in times] == ["3x20x1", "1x0x30"]
    for time in times:
        assert tuple(time.parts_ms) == PARTS
        assert 0 < time.fastest_ms <= time.total_ms
        assert all(milliseconds > 0 for milliseconds in time.parts_ms.values())


def test_a_step_beyond_the_context_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    config = EngineConfig(model=str(tiny_model), models_dir=tmp_path, dtype="float32")
    with pytest.raises(CommandFailed, match="was made for"):
        list(measure_steps(config, [StepShape(1, 100_000, 1)], repeat=1))


def test_json(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--model", str(tiny_model), "--models-dir", str(tmp_path), "--dtype", "float32"]
    assert main(["bench", "step", "2x8x1", "--repeat", "2", "--json", *settings]) == 0
    [time] = json.loads(capsys.readouterr().out)
    assert time["shape"] == "2x8x1"
    assert main(["bench", "step", "2x8x1", "--repeat", "2", *settings]) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    assert head.count("|") == row.count("|") == len(PARTS) + 4
