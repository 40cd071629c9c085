"""`chatd bench cache` on tiny loads."""

from __future__ import annotations

import json

import numpy as np
import pytest

from chatd.bench.cache_replay import replay
from chatd.bench.trace import Request, make_conversations, read_trace, shared_tokens
from chatd.cli import main

LINES = [[0, 1, 2], [0, 3], [0, 1, 2, 4], [0, 3, 5]]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"timestamp": 0, "hash_ids": ids}) + "\n" for ids in LINES))
    return path


# Looked up are 12 blocks; with room for all, 6 are found: [0], [0, 1, 2] and [0, 3]; the first block apart, 3 of 8.
@pytest.mark.parametrize(
    ("policy", "pages", "hits", "beyond", "refused"),
    [
        ("lru", 10, 6 / 12, 3 / 8, 0),
        ("turns", 10, 6 / 12, 3 / 8, 0),
        ("lru", 4, 5 / 12, 2 / 8, 0),
        ("lru", 3, 3 / 8, 1 / 5, 1),
        ("lru", 1, None, None, 4),
    ],
)
def test_hits_of_a_replay(trace, policy, pages, hits, beyond, refused):
    result = replay(read_trace(trace), policy, pages, page_size=1)
    assert (result.hit_rate, result.hit_rate_beyond_shared, result.refused) == (hits, beyond, refused)
    assert (result.evict_us_per_page is None) == (result.evicted_pages == 0)
    assert (result.bytes_per_token is None) == (refused == len(LINES))


def test_json_has_a_row_for_every_policy_and_size(trace, capsys):
    assert main(["bench", "cache", str(trace), "--policy", "lru", "slru", "--pages", "4", "10", "--json"]) == 0
    shown = capsys.readouterr()
    rows = json.loads(shown.out)
    assert [(row["policy"], row["pages"]) for row in rows] == [("lru", 4), ("lru", 10), ("slru", 4), ("slru", 10)]
    assert shown.err == ""


def test_a_table_of_made_up_conversations(capsys):
    options = ["--conversations", "4", "--turns", "3", "--pages", "2000", "--page-size", "4"]
    assert main(["bench", "cache", *options]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.split()[:3] == ["policy", "pages", "hits"]
    assert second.split()[:2] == ["lru", "2000"]


def test_made_up_conversations_go_on_and_come_again_from_a_seed():
    requests = make_conversations(5, 4, seed=1)
    again = make_conversations(5, 4, seed=1)
    assert all(np.array_equal(one.prompt, other.prompt) for one, other in zip(requests, again, strict=True))
    assert shared_tokens(requests) == 256
    histories = [np.concatenate((request.prompt, request.answer)).tolist() for request in requests]
    later = [request.prompt.tolist() for request in requests if len(request.prompt) > 256 + 255]
    assert later
    assert all(any(prompt[: len(history)] == history for history in histories) for prompt in later)


def test_what_all_begin_with():
    nothing = np.empty(0, np.int32)
    prompts = [[1, 2, 3, 4], [1, 2, 3], [1, 2, 9]]
    assert shared_tokens([Request(np.array(prompt, np.int32), nothing) for prompt in prompts]) == 2
    assert shared_tokens([]) == 0


@pytest.mark.parametrize("text", ["no json\n", "[1]\n", '{"ids": [1]}\n', '{"hash_ids": ["a"]}\n', '{"hash_ids": 1}\n'])
def test_what_is_no_trace_is_said_in_one_line(tmp_path, capsys, text):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    assert main(["bench", "cache", str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"chatd: {path} is no trace")


def test_a_missing_trace_is_said_in_one_line(tmp_path, capsys):
    assert main(["bench", "cache", str(tmp_path / "none")]) == 1
    assert "cannot be read: No such file" in capsys.readouterr().err


def test_an_empty_trace_is_said_in_one_line(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text("")
    assert main(["bench", "cache", str(path)]) == 1
    assert capsys.readouterr().err == f"chatd: {path} is empty\n"


@pytest.mark.parametrize(
    ("option", "value", "least"), [("--pages", 0, 1), ("--requests", 0, 1), ("--page-size", 0, 1), ("--seed", -1, 0)]
)
def test_what_is_too_small_is_said(option, value, least, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "cache", option, str(value)])
    assert f"less than {least}" in capsys.readouterr().err
