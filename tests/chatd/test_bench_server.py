"""The load benchmarks with servers of their own: real processes and the default model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

from chatd.cli import main
from chatd.commands.bench_load import ENGINE_SETTINGS
from chatd.commands.options import add_settings, flags_of, settings_of
from chatd.settings import Settings


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"model": "-odd=name", "page_size": 8, "prefix_cache": False, "kv_dtype": "int8", "pool_tokens": 4096},
        {"adapter": ["ann=/adapters/ann", "bob=/adapters/b=b"], "speculation": "draft", "draft_model": "/m"},
    ],
)
def test_flags_give_another_process_the_same_settings(chosen: dict[str, Any], tmp_path: Path) -> None:
    settings = Settings(models_dir=tmp_path, **chosen)
    parser = ArgumentParser()
    add_settings(parser)
    again = settings_of(parser.parse_args(flags_of(settings, ENGINE_SETTINGS)))
    assert again.engine_config() == settings.engine_config()


def bench(part: str, models_dir: Path, file: Path, *options: str) -> dict[str, Any]:
    assert main(["bench", part, "--models-dir", str(models_dir), "--json", str(file), *options]) == 0
    assert not servers_of(os.getpid())
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    assert content["errors"] == {}
    return content


def servers_of(parent: int) -> list[int]:
    """Processes that run `chatd serve` as children of this one, by Linux' own list."""
    children = Path(f"/proc/{parent}/task/{parent}/children")
    numbers = [int(number) for number in children.read_text().split()] if children.exists() else []
    return [number for number in numbers if b"\0serve\0" in Path(f"/proc/{number}/cmdline").read_bytes()]


@pytest.mark.slow
def test_conversations(models_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATD_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/never")
    content = bench(
        *("serve", models_dir, tmp_path / "all.json", "--sessions", "2", "--turns", "2", "--max-tokens", "6"),
        *("--page-size", "1", "--pool-tokens", "8192"),
    )
    rows = {(row["session"], row["turn"]): row for row in content["rows"]}
    assert sorted(rows) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    for session in (0, 1):
        first, second = rows[session, 1], rows[session, 2]
        assert first["output_tokens"] == second["output_tokens"] == 6
        assert second["cached_tokens"] >= first["prompt_tokens"] + 5  # pages of one token: all but the last sampled


@pytest.mark.slow
def test_scenarios(models_dir: Path, tmp_path: Path) -> None:
    content = bench("scenarios", models_dir, tmp_path / "all.json", "--requests", "1", "--scale", "0.16")
    for load, (prompt, output) in zip(content["scenarios"], [(20, 20), (328, 82), (82, 164)], strict=True):
        rows = [row for row in content["rows"] if row["load"] == load["name"]]
        assert [(row["prompt_tokens"], row["cached_tokens"], row["output_tokens"]) for row in rows] == [
            (prompt, 0, output)
        ]
        stages, wall = load["stages"], load["summary"]["wall_s"]
        assert 0 < stages["prefill_s"] < stages["decode_s"] < 2 * wall


@pytest.mark.slow
def test_turns(models_dir: Path, tmp_path: Path) -> None:
    content = bench("turns", models_dir, tmp_path / "all.json", "--history", "300", "--repeat", "1")
    (point,) = content["points"]
    assert (point["cached"]["mean_cached_tokens"], point["uncached"]["mean_cached_tokens"]) == (288, 0)
    assert point["cached"]["mean_prompt_tokens"] == point["uncached"]["mean_prompt_tokens"] > 330
    assert point["cached"]["ttft"]["p50_ms"] < point["uncached"]["ttft"]["p50_ms"]


@pytest.mark.slow
def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "chatd", "bench", "serve", "--model", str(tmp_path / "none")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    *log, line = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (1, "")
    assert line == "chatd: the server did not become ready; the end of its log stands above"
    assert any(str(tmp_path / "none") in each for each in log)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_signal_during_the_start_ends_the_server(models_dir: Path) -> None:
    command = [sys.executable, "-m", "chatd", "bench", "serve", "--models-dir", str(models_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as bench:
        while not (servers := servers_of(bench.pid)):
            assert bench.poll() is None
        bench.send_signal(signal.SIGTERM)
        out, _ = bench.communicate(timeout=60)
    assert (bench.returncode, out) == (130, b"")
    assert not any(Path(f"/proc/{number}").exists() for number in servers)
