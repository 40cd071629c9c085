"""`chatd bench turns`: its load, its curve, and its picture."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path

import pytest

from chatd.bench.client import Answer, RequestFailed, connect
from chatd.bench.histories import Curve, Histories
from chatd.bench.load import Load, Row
from chatd.bench.plot import draw
from chatd.bench.report import histories_report
from chatd.bench.words import find_prompts
from chatd.cli import main
from tests.support.openai_server import FakeServer, serving


async def test_each_history_is_as_long_as_asked_and_only_its_turn_is_new() -> None:
    server, histories = FakeServer(split=frozenset({"water"})), Histories([50, 200], new_words=30, repeats=3, seed=0)
    with serving(server):
        async with connect(server.url) as client:
            prompts = await find_prompts(client)
            before = len(server.bodies)
            with Load(client, "test", concurrency=1, expected=histories.requests) as load:
                await histories.run(load, prompts, prefix_cache=True)
    assert len(load.rows) == histories.requests == 12
    assert len(server.bodies) - before == 12
    kinds = Counter((row.labels["history"], row.labels["repeat"], row.labels["turn"]) for row in load.rows)
    assert kinds == Counter((length, repeat, turn) for length in (50, 200) for repeat in range(3) for turn in (1, 2))
    for first, second in zip(load.rows[::2], load.rows[1::2], strict=True):
        assert isinstance(first.outcome, Answer)
        assert isinstance(second.outcome, Answer)
        history = first.labels["history"]
        assert first.outcome.prompt_tokens is not None
        assert first.outcome.prompt_tokens + first.outcome.output_tokens == history
        # The end of the answer, the role, the opening, 30 words, the end of the message, the header of the answer.
        assert (second.outcome.cached_tokens, second.outcome.prompt_tokens) == (history, int(history) + 35)


async def test_a_history_that_fails_has_no_second_turn() -> None:
    server = FakeServer(refuse=lambda number: 500 if number == 3 else None)
    with serving(server):
        async with connect(server.url) as client:
            prompts = await find_prompts(client)
            with Load(client, "test", concurrency=1, expected=4) as load:
                await Histories([50, 60], new_words=3, repeats=1, seed=0).run(load, prompts, prefix_cache=False)
    assert [(row.labels["history"], row.labels["turn"]) for row in load.rows] == [(50, 1), (60, 1), (60, 2)]


def row(history: int, prefix_cache: int, turn: int, ttft_s: float | None) -> Row:
    labels: dict[str, int | str] = {"prefix_cache": prefix_cache, "history": history, "repeat": 0, "turn": turn}
    outcome = RequestFailed("no") if ttft_s is None else Answer("x", history, 16, 8, ttft_s, ttft_s, ttft_s, ())
    return Row(labels, 8, outcome)


ROWS = [
    *(row(250, 1, 1, 9.0), row(250, 1, 2, 0.1), row(250, 1, 2, 0.3)),
    *(row(250, 0, 1, 9.0), row(250, 0, 2, 0.5), row(250, 0, 2, 0.5)),
    *(row(4000, 1, 2, 0.25), row(4000, 0, 2, None)),
]


def test_a_curve_has_the_second_turns_of_both_servers() -> None:
    curve = Curve.of([250, 4000], ROWS)
    low, high = curve.points
    assert (low.cached.requests, low.cached.ttft.p50_ms, low.uncached.ttft.p50_ms) == (2, 200.0, 500.0)
    assert (high.cached.ttft.p50_ms, high.uncached.requests, high.uncached.ttft.p50_ms) == (250.0, 0, None)
    text = histories_report("title", curve).markdown()
    assert [line.split("|")[-2].strip() for line in text.splitlines() if line.startswith("|")][2:] == ["2.50", "-"]
    assert "1 of 8 requests failed: no" in text


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1]])
def test_the_picture(rows: list[Row], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="comes with chatd[bench]")
    path = tmp_path / "turns.png"
    draw(Curve.of([250, 4000], rows), "A title", path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == (1200, 750)
    assert len(content) > 5000


def test_a_plot_without_matplotlib_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("chatd.bench.plot.find_spec", lambda name: None)
    assert main(["bench", "turns", "--plot", str(tmp_path / "x.png")]) == 1
    assert capsys.readouterr().err == "chatd: --plot needs matplotlib: pip install 'chatd[bench]'\n"
