"""`chatd bench serve` and `chatd bench scenarios` against a tiny server that checks what it is asked."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from chatd.bench.conversations import read_questions
from chatd.cli import main
from chatd.failure import CommandFailed
from tests.support.openai_server import FakeServer, serving


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.txt"
    path.write_text("one two three\n\n  four five six \nseven eight nine\n", encoding="utf-8")
    return path


def bench(part: str, server: FakeServer, *options: Any) -> int:
    with serving(server):
        return main(["bench", part, "--url", server.url + "/v1/", *map(str, options)])


def found(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def test_conversations_to_the_last_token(tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server, file, text = FakeServer(key="secret-key"), tmp_path / "all.json", tmp_path / "all.md"
    options = ["--sessions", 5, "--turns", 4, "--concurrency", 2, "--max-tokens", 7, "--system-words", 40]
    options += ["--questions", questions, "--api-key", "secret-key", "--json", file, "--markdown", text]
    assert bench("serve", server, *options) == 0
    assert len(server.bodies) == 1 + 20
    assert server.most_running == 2
    content = found(file)
    # System 42, question 5, answer 7 + 2, and the header of the answer.
    prompts = {turn: 42 + 5 * turn + 9 * (turn - 1) + 1 for turn in range(1, 5)}
    rows = content["rows"]
    assert Counter((row["session"], row["turn"]) for row in rows) == Counter(
        (session, turn) for session in range(5) for turn in range(1, 5)
    )
    assert all(row["prompt_tokens"] == prompts[row["turn"]] and row["output_tokens"] == 7 for row in rows)
    # The whole earlier turn is found, and where another session asked the same, more of it.
    for turn in (2, 3, 4):
        assert min(row["cached_tokens"] for row in rows if row["turn"] == turn) == prompts[turn - 1] + 7
    summary = content["summary"]
    assert (summary["requests"], summary["output_tokens"]) == (20, 140)
    assert summary["prompt_tokens"] == 5 * sum(prompts.values())
    assert summary["hit_rate"] == sum(row["cached_tokens"] for row in rows) / summary["prompt_tokens"]
    assert (summary["ttft"]["count"], summary["late_ttft"]["count"], summary["itl"]["count"]) == (20, 15, 120)
    assert [(turn["turn"], turn["requests"], turn["mean_prompt_tokens"]) for turn in content["turns"]] == [
        (turn, 5, prompts[turn]) for turn in range(1, 5)
    ]
    assert (content["errors"], content["interrupted"]) == ({}, False)
    for row in rows:
        assert 0 < row["ttft_ms"] < row["e2e_ms"]
        assert len(row["itl_ms"]) == 6
    out = capsys.readouterr().out
    assert out == text.read_text(encoding="utf-8")
    lines = [line.split() for line in out.splitlines()]
    assert ["|", "4", "|", "5", "|", str(prompts[4]), "|"] in [line[:7] for line in lines]
    assert "secret" not in out + file.read_text(encoding="utf-8")


def test_histories_grow_and_share_their_system_prompt(questions: Path) -> None:
    server = FakeServer()
    assert bench("serve", server, "--sessions", 2, "--turns", 5, "--concurrency", 1, "--questions", questions) == 0
    chats = [body["messages"] for body in server.bodies[1:]]
    assert len({chat[0]["content"] for chat in chats}) == 1
    assert len(chats[0][0]["content"].split()) == 100
    for last in [chat for chat in chats if len(chat) == 10]:
        assert [message["role"] for message in last] == ["system", *["user", "assistant"] * 4, "user"]
        assert len({message["content"] for message in last[1::2][:3]}) == 3  # all questions once, then again
        assert all(last[:n] in chats for n in (2, 4, 6, 8))
        assert last[2]["content"].split() == [f"a{n}" for n in range(48)]


def test_no_system_prompt(questions: Path) -> None:
    server = FakeServer()
    options = ["--sessions", 1, "--turns", 1, "--questions", questions, "--system-words", 0]
    assert bench("serve", server, *options) == 0
    assert [message["role"] for message in server.bodies[1]["messages"]] == ["user"]


def test_a_model_that_is_named_is_not_looked_up(questions: Path) -> None:
    server = FakeServer(model="mine", listed="other")
    options = ["--sessions", 1, "--turns", 1, "--questions", questions, "--model", "mine"]
    assert bench("serve", server, *options) == 0
    assert {body["model"] for body in server.bodies} == {"mine"}


def test_failed_requests_are_told_and_left_out(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, file = FakeServer(refuse=lambda number: {2: 503, 4: 503, 5: 500}.get(number)), tmp_path / "all.json"
    options = ["--sessions", 1, "--turns", 6, "--concurrency", 1, "--questions", questions, "--json", file]
    assert bench("serve", server, *options) == 0
    told = capsys.readouterr()
    assert told.err.splitlines() == [
        "chatd: a request failed: HTTP 503: refused with 503",
        "chatd: a request failed: HTTP 500: refused with 500",
    ]
    assert "2 of 6 requests failed: HTTP 503" in told.out
    assert "1 of 6 requests failed: HTTP 500" in told.out
    content = found(file)
    assert content["errors"] == {"HTTP 503: refused with 503": 2, "HTTP 500: refused with 500": 1}
    assert [("error" in row) for row in content["rows"]] == [False, True, False, True, True, False]
    assert content["summary"]["requests"] == 3
    assert len(server.bodies[-1]["messages"]) == 6  # the system prompt, two whole turns, and the question


def test_when_all_requests_fail(questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer(refuse=lambda number: 503 if number else None)
    options = ["--sessions", 2, "--turns", 2, "--questions", questions]
    assert bench("serve", server, *options) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines()[-1] == "chatd: all 4 requests failed: HTTP 503: refused with 503"


def test_a_report_that_cannot_be_written_is_shown(questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("Linux only")
    options = ["--sessions", 1, "--turns", 1, "--questions", questions]
    assert bench("serve", FakeServer(), *options, "--markdown", full) == 1
    told = capsys.readouterr()
    assert told.err == "chatd: /dev/full cannot be written: No space left on device\n"
    assert "over all" in told.out


def test_a_server_that_stops_early(questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer(lengths=lambda wanted: min(wanted, 3), usage=False)
    assert bench("serve", server, "--sessions", 1, "--turns", 2, "--questions", questions) == 0
    out = capsys.readouterr().out
    assert "2 of 2 answers did not get the length that was asked for, but 3 tokens" in out
    assert "| hit rate                           |" in out
    assert "-" in next(line for line in out.splitlines() if line.startswith("| hit rate")).split("|")[2]


def test_a_server_that_knows_no_exact_lengths_is_asked_without(questions: Path) -> None:
    server = FakeServer(exact=False)
    assert bench("serve", server, "--sessions", 1, "--turns", 2, "--questions", questions) == 0
    assert len(server.bodies) == 1 + 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_there_is(
    number: signal.Signals, tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, file = FakeServer(hold=lambda n: n == 3), tmp_path / "all.json"
    server.on_request = lambda n: os.kill(os.getpid(), number) if n == 3 else None
    options = ["--sessions", 1, "--turns", 6, "--questions", questions, "--json", file]
    assert bench("serve", server, *options) == 130
    out = capsys.readouterr().out
    assert "Interrupted: these are the answers that were whole by then." in out
    content = found(file)
    assert content["interrupted"] is True
    assert [row["turn"] for row in content["rows"]] == [1, 2]


def test_an_interrupt_before_any_answer(questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer(hold=lambda n: True)
    server.on_request = lambda n: os.kill(os.getpid(), signal.SIGINT)
    assert bench("serve", server, "--questions", questions) == 130
    assert capsys.readouterr().out == ""


def test_three_loads_of_exact_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("queue", "prefill", "decode")

    def metrics(answered: int) -> str:
        """Every answer takes 1 s, 2 s and 5 s."""
        kinds = [(f"chatd_{name}_seconds", answered * s) for name, s in zip(names, (1, 2, 5), strict=True)]
        return "".join(f"# TYPE {name} histogram\n{name}_sum {value}\n" for name, value in kinds)

    server, file = FakeServer(metrics=metrics, split=frozenset({"world"})), tmp_path / "all.json"
    assert bench("scenarios", server, "--concurrency", 3, "--requests", 5, "--scale", 0.25, "--json", file) == 0
    assert 1 < server.most_running <= 3
    expected = [("short answers", 32, 32), ("summaries", 512, 128), ("code", 128, 256)]
    asked = list(zip(server.prompts(), [body["max_tokens"] for body in server.bodies], strict=True))
    assert asked[-15:] == [(prompt, output) for _, prompt, output in expected for _ in range(5)]
    content = found(file)
    loads = content["scenarios"]
    assert [(load["name"], load["prompt_tokens"], load["output_tokens"]) for load in loads] == expected
    assert [load["summary"]["requests"] for load in loads] == [5, 5, 5]
    assert all(load["stages"] == {"queue_s": 5.0, "prefill_s": 10.0, "decode_s": 25.0} for load in loads)
    assert Counter(row["load"] for row in content["rows"]) == dict.fromkeys([name for name, _, _ in expected], 5)
    # The role of the first message, the opening, and by chance a word or two: nothing is shared.
    assert all(row["cached_tokens"] <= 5 for row in content["rows"])
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if "12.5% |   25.0% |  62.5%" in line]) == 3
    assert "| summaries     |    512 |    128 |       5 |      0 |" in out


def test_loads_of_a_server_without_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server, file = FakeServer(), tmp_path / "all.json"
    assert bench("scenarios", server, "--concurrency", 4, "--scale", 0.125, "--json", file) == 0
    content = found(file)
    assert [load["summary"]["requests"] for load in content["scenarios"]] == [4, 4, 4]
    assert all(load["stages"] is None for load in content["scenarios"])
    assert all(0 < load["summary"]["first_token_share"] < 1 for load in content["scenarios"])
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if line.endswith("|       - |       - |      - |")]) == 3


def test_too_small_a_scale_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("scenarios", FakeServer(), "--scale", 0.02) == 1
    assert "a prompt of this model has more than" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["serve", "scenarios"])
def test_nobody_there(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeServer()) as gone:
        pass
    assert main(["bench", part, "--url", gone.url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"chatd: {gone.url} gives no answer: ConnectError")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--turns", "0"], "argument --turns: 0 is less than 1"),
        (["serve", "--sessions", "x"], "argument --sessions: x is no whole number"),
        (["serve", "--think", "-1"], "argument --think: -1 is less than 0"),
        (["serve", "--think", "inf"], "argument --think: inf is no number"),
        (["serve", "--url", "localhost:8000"], "localhost:8000 is no address of a server"),
        (["serve", "--url", "http://host:port"], "http://host:port is no address of a server"),
        (["serve", "--url", "http://h?x=1"], "is no address of a server"),
        (["serve", "--url", "http://user:word@h"], "is no address of a server"),
        (["serve", "--api-key", "clé"], "argument --api-key: a key has printable ASCII characters only"),
        (["serve", "--json", "/nowhere/x.json"], "/nowhere/x.json cannot be written: no such folder"),
        (["serve", "--markdown", "/tmp"], "/tmp cannot be written: a folder"),
        (["scenarios", "--scale", "0"], "argument --scale: 0 is not above 0"),
        (["scenarios", "--scale", "nan"], "argument --scale: nan is no number"),
        (["turns", "--history", "0"], "argument --history: 0 is less than 1"),
        (["turns", "--no-prefix-cache"], "unrecognized arguments: --no-prefix-cache"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--api-key", "x"], "chatd: --api-key: only with --url"),
        (["serve", "--url", "http://h", "--page-size", "8"], "chatd: --page-size: only without --url"),
        (["scenarios", "--url", "http://h", "--no-prefix-cache"], "chatd: --prefix-cache: only without --url"),
        (["serve", "--page-size", "0"], "chatd: --page-size: Input should be greater than or equal to 1"),
        (["turns", "--threads", "0"], "chatd: --threads: Input should be greater than or equal to 1"),
    ],
)
def test_wrong_settings(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


def test_questions(tmp_path: Path) -> None:
    assert len(set(read_questions(None))) >= 48
    lines = tmp_path / "mtbench.jsonl"
    lines.write_text('{"turns": ["first", "second"]}\n{"turns": ["other"]}\n', encoding="utf-8")
    assert read_questions(lines) == ["first", "other"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "cannot be read: No such file"),
        ("empty.txt", b" \n", "is empty"),
        ("bytes.txt", b"\xff\xfe", "has no questions"),
        ("lines.jsonl", b"plain", "has no questions"),
        ("lines.jsonl", b'{"turns": []}', "has no questions"),
        ("lines.jsonl", b"[1]", "has no questions"),
    ],
)
def test_files_without_questions(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CommandFailed, match=message):
        read_questions(tmp_path / name)
