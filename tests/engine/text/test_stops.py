"""Many strings looked for at once: the earliest end counts, and only what may still become one is held."""

from __future__ import annotations

import random
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text import StopMatcher, StopStrings

ALPHABET = "Here is the English alphabet: ABC"


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    """The text up to the stop, and whether one came."""
    matcher, text = StopMatcher(StopStrings(stops)), ""
    for piece in pieces:
        start = matcher.push(piece)
        text += piece
        if start is not None:
            return text[: len(text) - len(piece) + start], True
    return text, False


CASES: dict[str, tuple[list[str], str, str, bool]] = {
    # stops, text, what is kept, whether it stopped
    "never begun in full": (["DEFGHIJ"], ALPHABET, ALPHABET, False),
    "found": (["DEFGHIJ"], ALPHABET + "DEFGHIJKL", ALPHABET, True),
    "inside a piece": (["\n"], "?\nMore", "?", True),
    "at the very start": (["ab"], "abc", "", True),
    "the earliest end, not the earliest start": (["abcd", "bc"], "abcd", "a", True),
    "the longest of those that end together": (["bc", "abc"], "xabc", "x", True),
    "a suffix of another, alone": (["bc", "abc"], "xbc", "x", True),
    "a prefix of another": (["ab", "abc"], "xabc", "x", True),
    "overlapping strings": (["aba", "bab"], "xabab", "x", True),
    "again after a false start": (["aab"], "aaab", "a", True),
    "a false start inside another": (["abac", "bad"], "abad", "a", True),
    "repeats": (["aaaa"], "aaabaaaa", "aaab", True),
    "unicode": (["👨‍👩‍👧"], "x👨‍👩‍👨‍👩‍👧y", "x👨‍👩‍", True),
    "composed is not decomposed": (["e\u0301"], "\u00e9", "\u00e9", False),
    "nothing to look for": ([], "anything", "anything", False),
    "the same string twice": (["x", "x"], "axb", "a", True),
}


@pytest.mark.parametrize(("stops", "text", "kept", "stopped"), CASES.values(), ids=CASES.keys())
def test_cases(stops: list[str], text: str, kept: str, stopped: bool) -> None:
    for size in (1, 2, 3, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert run(stops, pieces) == (kept, stopped)


@pytest.mark.parametrize(
    ("stops", "text", "held"),
    [
        (["DEFGHIJ"], ALPHABET, 0),
        (["DEFGHIJ"], "ABCDEF", 3),
        (["abcd", "cde"], "xabc", 3),
        (["abcd", "cde"], "xabcx", 0),
        (["abx", "b"], "a", 1),
        (["aab"], "aaaa", 2),
        (["\n\n"], "line\n", 1),
        ([], "abc", 0),
    ],
)
def test_held_is_the_longest_suffix_that_begins_a_stop(stops: list[str], text: str, held: int) -> None:
    matcher = StopMatcher(StopStrings(stops))
    assert matcher.push(text) is None
    assert matcher.held == held


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=6),
    st.text("abc", max_size=40),
    st.lists(st.integers(1, 4), min_size=1),
)
@settings(max_examples=400, deadline=None)
def test_any_stops_in_any_pieces(stops: list[str], text: str, sizes: list[int]) -> None:
    ends = [n for n in range(1, len(text) + 1) if text[:n].endswith(tuple(stops))]
    expected = (text, False)
    if ends:
        found = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        expected = (text[: ends[0] - len(found)], True)
    pieces, position = [], 0
    while position < len(text):
        pieces.append(text[position : position + sizes[len(pieces) % len(sizes)]])
        position += len(pieces[-1])
    assert run(stops, pieces) == expected
    if not ends:
        matcher = StopMatcher(StopStrings(stops))
        matcher.push(text)
        begun = [n for n in range(len(text) + 1) if any(stop.startswith(text[len(text) - n :]) for stop in stops)]
        assert matcher.held == max(begun, default=0)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_a_thousand_stops_cost_no_more_than_one() -> None:
    chance = random.Random(1)
    words = ["".join(chance.choices(string.ascii_lowercase, k=chance.randint(5, 20))) for _ in range(1000)]
    text = "".join(chance.choices(string.ascii_lowercase, k=20_000))

    def work(stops: list[str]) -> int:
        matcher = StopMatcher(StopStrings(stops))
        assert matcher.push(text) is None
        return matcher.transitions

    assert len(text) <= work(words[:1]) <= 2 * len(text)
    assert len(text) <= work(words) <= 2 * len(text)


@pytest.mark.parametrize("length", [10, 1000])
def test_the_worst_text_costs_two_transitions_a_character(length: int) -> None:
    stops = ["a" * n + "b" for n in range(1, length)]
    text = ("a" * length + "c") * 5
    matcher = StopMatcher(StopStrings(stops[-60:]))
    assert matcher.push(text) is None
    assert matcher.transitions <= 2 * len(text)
