"""Ids to text in any portions: whole characters only, all of them, each as soon as it is whole."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text import ChatAssets, Codec, Detokenizer, Vocabulary

HARD = "Repeat exactly: 👨‍👩‍👧‍👦 🇯🇵 ďábelské 你好 한국어 é क्षि ﷽"

ALPHABET = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in ALPHABET]
CONTROL, TAG, REAL_FFFD, MIXED = 256, 257, 258, 259
A, NUL = b"A"[0], 0


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """Id n < 256 is the byte n; then a control token, a tag that is shown, a real U+FFFD, " " with half of an é."""
    written = {byte: chr(byte) for byte in ALPHABET} | {byte: chr(256 + n) for n, byte in enumerate(OTHERS)}
    vocab = {written[byte]: byte for byte in range(256)}
    vocab["".join(written[byte] for byte in "\ufffd".encode())] = REAL_FFFD
    vocab["".join(written[byte] for byte in b" \xc3")] = MIXED
    added = [
        {"id": CONTROL, "content": "<|end|>", "special": True},
        {"id": TAG, "content": "<tag é>", "special": False},
    ]
    return Vocabulary({"model": {"vocab": vocab}, "added_tokens": added, "decoder": {"type": "ByteLevel"}})


@pytest.mark.parametrize(
    ("ids", "deltas", "end"),
    [
        (b"Hi", ["H", "i"], ""),
        ("é".encode(), ["", "é"], ""),
        ("👨".encode(), ["", "", "", "👨"], ""),
        ("\ufffd".encode(), ["", "", "\ufffd"], ""),
        ([REAL_FFFD, A], ["\ufffd", "A"], ""),
        ([NUL, A], ["\ufffd", "A"], ""),
        ([0x80, A], ["\ufffd", "A"], ""),
        ([0xF0, 0x9F, A], ["", "", "\ufffdA"], ""),
        ([0xF0, 0x9F, 0xF0, 0x9F, 0x91, 0xA8], ["", "", "\ufffd", "", "", "👨"], ""),
        ([0xED, 0xA0, 0x80], ["", "", "\ufffd\ufffd\ufffd"], ""),
        ([0xE4, 0xBD], ["", ""], "\ufffd"),
        ([A, CONTROL], ["A", ""], ""),
        ([0xC3, CONTROL, 0xA9], ["", "", "é"], ""),
        ([TAG, CONTROL, 999], ["<tag é>", "", ""], ""),
    ],
)
def test_one_by_one(vocabulary: Vocabulary, ids: bytes | list[int], deltas: list[str], end: str) -> None:
    detokenizer = Detokenizer(vocabulary)
    assert [detokenizer.push([token]) for token in ids] == deltas
    assert detokenizer.flush() == end
    assert detokenizer.whole == (len(ids), len("".join(deltas) + end)) == (len(ids), detokenizer.characters)


@pytest.mark.parametrize(
    ("pushes", "ids", "characters"),
    [
        ([b"Hi"], 2, 2),
        ([b"Hi", [CONTROL]], 3, 2),
        ([b"Hi\xf0"], 2, 2),
        ([b"Hi\xf0", b"\x9f", b"\x91"], 2, 2),
        ([b"Hi\xf0", b"\x9f\x91"], 2, 2),
        ([b"Hi\xf0", b"\x9f\x91\xa8"], 6, 3),
        ([b"Hi\xf0", b"\x9f", b"\xe4"], 4, 3),
        ([[0xF0], [CONTROL]], 0, 0),
        ([[0xF0, CONTROL]], 0, 0),
        ([[CONTROL, 0xF0, CONTROL]], 1, 0),
        ([[0xF0], [CONTROL, 0x9F]], 0, 0),
        ([[0xF0, CONTROL, 0x9F, CONTROL]], 0, 0),
        ([[A], [MIXED]], 1, 1),
        ([[A], [MIXED], [0xA9]], 3, 3),
        ([[A], [MIXED], [A]], 3, 4),
        ([[A], [MIXED], [CONTROL]], 1, 1),
        ([[A], [0xC3], [MIXED]], 1, 1),
    ],
)
def test_where_ids_and_text_end_together(
    vocabulary: Vocabulary, pushes: list[bytes | list[int]], ids: int, characters: int
) -> None:
    detokenizer = Detokenizer(vocabulary)
    for portion in pushes:
        detokenizer.push(portion)
    assert detokenizer.whole == (ids, characters)


@given(st.lists(st.integers(0, MIXED)), st.lists(st.integers(0, 6), min_size=1))
@settings(max_examples=300, deadline=None)
def test_any_ids_in_any_portions(vocabulary: Vocabulary, ids: list[int], sizes: list[int]) -> None:
    whole = b"".join(map(vocabulary.bytes_of, ids))
    detokenizer = Detokenizer(vocabulary)
    deltas, start, seen = [], 0, ""
    for number in range(len(ids) + 1):
        size = sizes[number % len(sizes)]
        deltas.append(detokenizer.push(ids[start : start + size]))
        start += size
        seen = b"".join(map(vocabulary.bytes_of, ids[:start])).decode(errors="replace").replace("\0", "\ufffd")
        so_far = "".join(deltas)
        # At most one character is held back; half a surrogate, were it the end, would be two U+FFFD.
        assert so_far in (seen, seen[:-1], seen.removesuffix("\ufffd\ufffd"))
    deltas += [detokenizer.push(ids[start:]), detokenizer.flush()]
    assert "".join(deltas) == whole.decode(errors="replace").replace("\0", "\ufffd")


@pytest.mark.parametrize("seed", range(5))
def test_hard_text_of_the_default_model(default_codec: Codec, seed: int) -> None:
    ids = default_codec.encode(HARD).tolist()
    chance = random.Random(seed)
    detokenizer = default_codec.detokenizer()
    deltas = []
    while ids:
        size = 1 if seed == 0 else chance.randint(1, 5)
        deltas.append(detokenizer.push(ids[:size]))
        ids = ids[size:]
    assert "".join(deltas) == HARD
    assert "\ufffd" not in "".join(deltas)
    assert detokenizer.flush() == ""


def test_hard_text_in_every_split_and_cut_anywhere(default_codec: Codec) -> None:
    ids = default_codec.encode(HARD).tolist()
    for first in range(len(ids) + 1):
        for second in range(first, len(ids) + 1):
            detokenizer = default_codec.detokenizer()
            portions = (ids[:first], ids[first:second], ids[second:])
            assert "".join(map(detokenizer.push, portions)) == HARD
            assert detokenizer.whole == (len(ids), len(HARD))
        cut = default_codec.detokenizer()
        text = cut.push(ids[:first])
        assert HARD.startswith(text)
        whole = cut.whole
        assert default_codec.decode(ids[: whole.ids]) == text[: whole.characters]
        assert cut.flush() in ("", "\ufffd")


def test_every_id_of_the_default_model(default_codec: Codec, default_assets: ChatAssets) -> None:
    added = {token["id"] for token in json.loads(default_assets.tokenizer_json)["added_tokens"]}
    vocabulary = default_codec.vocabulary
    assert len(vocabulary) == default_codec.vocab_size == 49152
    assert {token for token in range(len(vocabulary)) if vocabulary.bytes_of(token) == b""} == added
    assert {vocabulary.bytes_of(token) for token in range(len(vocabulary))} >= {
        bytes([byte]) for byte in range(0x20, 0x7F)
    }


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["▁Hello", "▁there"], "Hello there"),
        (["▁", "▁Hello"], " Hello"),
        (["Hello", "▁"], "Hello "),
        (["<s>", "▁Hello", "</s>"], "Hello"),
        (["<0xE4>", "<0xBD>", "<0xA0>", "▁x"], "你 x"),
        (["▁", "<0xE4>", "x"], "\ufffdx"),
        (["<0x0A>", "▁x"], "\n x"),
    ],
)
def test_sentencepiece(tokens: list[str], text: str) -> None:
    vocab = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    specials = [{"id": vocab[t], "content": t, "special": True} for t in ("<s>", "</s>") if t in vocab]
    steps = [{"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    decoder = {"type": "Sequence", "decoders": [{"type": "Replace"}, *steps]}
    vocabulary = Vocabulary({"model": {"vocab": vocab}, "added_tokens": specials, "decoder": decoder})
    detokenizer = Detokenizer(vocabulary)
    assert "".join(detokenizer.push([vocab[token]]) for token in tokens) + detokenizer.flush() == text
