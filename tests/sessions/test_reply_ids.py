"""Generated ids cut to the text that was shown."""

from __future__ import annotations

import pytest

from sessions.reply_ids import reply_ids, shown
from tests.sessions.letters_codec import END, MIXED, SILENT, LettersCodec, token


def ids(text: str) -> list[int]:
    return [token(byte) for byte in text.encode()]


E1, E2 = ids("é")
CASES: dict[str, tuple[list[int], int, str, bool, bool, list[int]]] = {
    # generated, heard, text, stopped, ended -> kept
    "all shown": ([*ids("ab"), END], 2, "ab", True, True, [*ids("ab"), END]),
    "stop id with the last text": ([*ids("ab"), END], 3, "ab", True, True, [*ids("ab"), END]),
    "cancelled": (ids("ab"), 2, "ab", False, False, ids("ab")),
    "cancelled, silent tail": ([*ids("ab"), SILENT], 2, "ab", False, False, ids("ab")),
    "ended, silent tail": ([*ids("ab"), SILENT], 2, "ab", False, True, [*ids("ab"), SILENT]),
    "stopped, silent tail": ([*ids("ab"), SILENT, END], 2, "ab", True, True, [*ids("ab"), SILENT, END]),
    "half a character": ([*ids("ab"), E1], 2, "ab", False, True, ids("ab")),
    "half a character, then stopped": ([*ids("ab"), E1, END], 2, "ab", True, True, [*ids("ab"), END]),
    "a token with a shown part": ([*ids("ab"), MIXED], 3, "ab ", False, False, ids("ab ")),
    "three bytes of four": (ids("a😀")[:-1], 1, "a", False, False, ids("a")),
    "a shown U+FFFD": ([*ids("a"), 8 + 0xFF, *ids("b")], 3, "a\ufffdb", False, False, [*ids("a"), 8 + 0xFF, *ids("b")]),
    "a shown U+FFFD last": ([*ids("a"), 8 + 0xFF], 2, "a\ufffd", False, False, [*ids("a"), 8 + 0xFF]),
    "U+0000": (ids("a\0b"), 3, "a\ufffdb", False, True, ids("a\0b")),
    "nothing": ([], 0, "", False, False, []),
    "only the end": ([END], 0, "", True, True, [END]),
}


@pytest.mark.parametrize(("generated", "heard", "text", "stopped", "ended", "kept"), CASES.values(), ids=CASES.keys())
def test_the_ids_are_exactly_the_texts(
    generated: list[int], heard: int, text: str, stopped: bool, ended: bool, kept: list[int]
) -> None:
    codec = LettersCodec()
    found = reply_ids(codec, generated, heard, text, stopped=stopped, ended=ended)
    assert found.tolist() == kept
    assert shown(codec.decode(found)) == text
    assert (found.dtype.name, found.ndim) == ("int32", 1)
