"""`chatd bench perplexity` on a small random model, against transformers' own loss."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import exp
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from chatd.bench.perplexity import Window, read_text, windows
from chatd.cli import main
from tests.support.tiny_models import ascii_tokenizer, save_tiny

TEXT = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return folder, save_tiny(folder, "llama")


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def bench(tiny: tuple[Path, PreTrainedModel], text: str, *options: str) -> int:
    folder, _ = tiny
    file = folder / "text.txt"
    file.write_text(text, encoding="utf-8")
    models = str(folder / "converted")
    where = ["--model", str(folder), "--models-dir", models, "--text", str(file), "--threads", "1"]
    return main(["bench", "perplexity", *where, *options])


@pytest.mark.parametrize(
    ("tokens", "length", "expected"),
    [
        (1, 8, []),
        (2, 8, [(0, 1, 2)]),
        (8, 8, [(0, 1, 8)]),
        (9, 8, [(0, 1, 8), (4, 8, 9)]),
        (20, 8, [(0, 1, 8), (4, 8, 12), (8, 12, 16), (12, 16, 20)]),
        (5, 2, [(0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4, 5)]),
        (7, 3, [(0, 1, 3), (1, 3, 4), (2, 4, 5), (3, 5, 6), (4, 6, 7)]),
    ],
)
def test_windows_predict_every_token_but_the_first_once(
    tokens: int, length: int, expected: list[tuple[int, int, int]]
) -> None:
    found = list(windows(tokens, length))
    assert found == [Window(*each) for each in expected]
    assert [n for each in found for n in range(each.scored, each.stop)] == list(range(1, tokens))
    assert all(each.stop - each.start <= length for each in found)


def reference(model: PreTrainedModel, ids: torch.Tensor, length: int) -> float:
    """Each window through transformers, in one piece."""
    losses: list[torch.Tensor] = []
    for part in windows(len(ids), length):
        with torch.inference_mode():
            logits = model(ids[None, part.start : part.stop]).logits[0, :-1]
        every = torch.nn.functional.cross_entropy(logits, ids[part.start + 1 : part.stop], reduction="none")
        losses.append(every[part.scored - part.start - 1 :])
    return exp(torch.cat(losses).mean())


@pytest.mark.parametrize(("window", "tokens"), [(512, 150), (64, 150), (16, 100)])
def test_equals_transformers_in_steps_of_any_size(
    tiny: tuple[Path, PreTrainedModel], window: int, tokens: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = torch.tensor(ascii_tokenizer().encode(TEXT).ids)[:tokens]
    options = ["--dtype", "float32", "--kv-dtype", "float32", "int8", "--rows", "7", "256"]
    assert bench(tiny, TEXT, *options, "--window", str(window), "--tokens", str(tokens), "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["kv"], row["rows"]) for row in rows] == [("float32", 7), ("float32", 256), ("int8", 7), ("int8", 256)]
    expected = reference(tiny[1], ids, window)
    for row in rows:
        assert row["scored"] == tokens - 1
        assert row["perplexity"] == pytest.approx(expected, rel=1e-4 if row["kv"] == "float32" else 0.05)
    assert rows[2]["perplexity"] != pytest.approx(expected, rel=1e-5)


def test_a_table_compares_with_its_first_line(
    tiny: tuple[Path, PreTrainedModel], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tiny, TEXT, "--dtype", "float32", "bfloat16", "--window", "64") == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["weights", "K", "and", "V"]
    assert first.split()[:2] == ["float32", "bfloat16"]
    assert first.split()[5] == "+0.00%"
    change = float(second.split()[4]) / float(first.split()[4]) - 1
    assert second.split()[5] == f"{change:+.2%}"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", [], "the text is too short"),
        ("T", [], "the text is too short"),
        (TEXT, ["--tokens", "1"], "the text is too short"),
        (TEXT, ["--window", "1"], "a window has at least 2 tokens, and at most the 512"),
        (TEXT, ["--window", "513"], "a window has at least 2 tokens, and at most the 512"),
        (TEXT, ["--model", "/nowhere"], "/nowhere"),
        (TEXT, ["--text", "/nowhere/text"], "/nowhere/text cannot be read"),
    ],
)
def test_what_cannot_be_measured_is_told_in_a_line(
    tiny: tuple[Path, PreTrainedModel],
    text: str,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench(tiny, text, "--dtype", "float32", "--window", "64", *options) == 1
    assert message in capsys.readouterr().err


def test_a_file_of_other_bytes_is_no_text(
    tiny: tuple[Path, PreTrainedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfd")
    assert bench(tiny, TEXT, "--text", str(tmp_path / "bytes")) == 1
    assert "is no text in UTF-8" in capsys.readouterr().err


def test_the_default_text_is_long_enough() -> None:
    assert len(read_text(None).split()) > 8192
