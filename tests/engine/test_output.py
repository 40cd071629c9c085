"""What a choice lets out, delta by delta: ids and exactly the text that they spell, up to where the text ends."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import Delta, FinishReason, GenerateRequest, SampledLogprob, SamplingParams, TokenLogprob
from engine.output import ChoiceOutput
from engine.text import Codec, Detokenizer, StopStrings, Vocabulary
from tests.engine.text.test_detokenizer import ALPHABET, OTHERS

HARD = "Repeat exactly: 👨‍👩‍👧‍👦 🇯🇵 ďábelské 你好 한국어 é क्षि ﷽"
EOS, SHOWN_EOS, SILENT, WORDS = 256, 257, 258, 259
TEXTS = (b" \xc3", b"Hello", b".\n", b"\n\nUser", b"\xa9\xc3", b"?\n", b"AB", b"CD")
MIXED, HELLO, DOT, USER, BRIDGE, ASK, AB, CD = range(WORDS, WORDS + len(TEXTS))


def b(text: str) -> list[int]:
    return list(text.encode())


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """Id n < 256 is the byte n; then two eos ids, one of which has a text, a silent control token, and TEXTS."""
    written = {byte: chr(byte) for byte in ALPHABET} | {byte: chr(256 + n) for n, byte in enumerate(OTHERS)}
    vocab = {written[byte]: byte for byte in range(256)}
    vocab |= {"".join(written[byte] for byte in text): WORDS + n for n, text in enumerate(TEXTS)}
    added = [
        {"id": EOS, "content": "<|end|>", "special": True},
        {"id": SHOWN_EOS, "content": "</s>", "special": False},
        {"id": SILENT, "content": "<|silent|>", "special": True},
    ]
    return Vocabulary({"model": {"vocab": vocab}, "added_tokens": added, "decoder": {"type": "ByteLevel"}})


def output(vocabulary: Vocabulary, **params: object) -> ChoiceOutput:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    request = GenerateRequest("r", np.ones(1, np.int32), sampling)
    stops = StopStrings(sampling.stop)
    return ChoiceOutput(request, 3, Detokenizer(vocabulary), frozenset({EOS, SHOWN_EOS}), stops)


def drive(out: ChoiceOutput, ids: list[int], *, limit: int | None = None) -> list[Delta]:
    """The deltas for `ids`, until the choice ends; after `limit` ids by length, after all by cancellation."""
    deltas = []
    for count, token in enumerate(ids, start=1):
        delta = out.push(token, last=count == limit)
        if delta is not None:
            deltas.append(delta)
        if out.reason is not None:
            return deltas
    return [*deltas, out.end("cancelled")]


Shown = tuple[list[int], str]
CASES: dict[str, tuple[dict[str, object], list[int], list[Shown], int, FinishReason]] = {
    # params, sampled ids, (ids, text) of each delta, unspelled characters, reason
    "plain": ({}, [*b("Hi"), EOS], [(b("H"), "H"), (b("i"), "i"), ([EOS], "")], 0, "stop"),
    "an eos with a text of its own": ({}, [*b("H"), SHOWN_EOS], [(b("H"), "H"), ([SHOWN_EOS], "")], 0, "stop"),
    "eos ignored": (
        {"ignore_eos": True},
        [EOS, SHOWN_EOS],
        [([EOS], ""), ([SHOWN_EOS], "</s>"), ([], "")],
        0,
        "cancelled",
    ),
    "a stop id with its text": (
        {"stop_token_ids": (DOT,)},
        [HELLO, DOT],
        [([HELLO], "Hello"), ([DOT], ".\n")],
        0,
        "stop",
    ),
    "a stop id that is an eos, which is ignored": (
        {"stop_token_ids": (EOS,), "ignore_eos": True},
        [HELLO, EOS],
        [([HELLO], "Hello"), ([EOS], "")],
        0,
        "stop",
    ),
    "a character of many tokens": ({}, [*b("é"), EOS], [(b("é"), "é"), ([EOS], "")], 0, "stop"),
    "half a character, then eos": ({}, [HELLO, 0xC3, EOS], [([HELLO], "Hello"), ([EOS], "")], 0, "stop"),
    "half a character, silence, eos": ({}, [HELLO, 0xC3, SILENT, EOS], [([HELLO], "Hello"), ([EOS], "")], 0, "stop"),
    "half a character at the end": ({"max_tokens": 2}, [HELLO, 0xC3], [([HELLO], "Hello"), ([], "")], 0, "length"),
    "text and half a character in a token": (
        {},
        [HELLO, MIXED, 0xA9],
        [([HELLO], "Hello"), ([MIXED, 0xA9], " é"), ([], "")],
        0,
        "cancelled",
    ),
    "the same, at the end": ({"max_tokens": 2}, [HELLO, MIXED], [([HELLO], "Hello"), ([], " ")], 1, "length"),
    "the same, then eos": ({}, [HELLO, MIXED, EOS], [([HELLO], "Hello"), ([], " ")], 1, "stop"),
    "a token between two characters": (
        {},
        [0xC3, BRIDGE, 0xA9, EOS],
        [([0xC3, BRIDGE, 0xA9], "éé"), ([EOS], "")],
        0,
        "stop",
    ),
    "the same, cut": ({}, [0xC3, BRIDGE, EOS], [([], "é")], 1, "stop"),
    "what can be no character": ({}, [0xF0, AB, EOS], [([0xF0, AB], "\ufffdAB"), ([EOS], "")], 0, "stop"),
    "control tokens are silent": ({}, [SILENT, AB, EOS], [([SILENT], ""), ([AB], "AB"), ([EOS], "")], 0, "stop"),
    "a stop that is a token": ({"stop": ("AB",)}, [HELLO, AB], [([HELLO], "Hello"), ([], "")], 0, "stop"),
    "completed by the first token": ({"stop": ("AB",)}, [AB], [([], "")], 0, "stop"),
    "over many tokens": ({"stop": ("oABCD!",)}, [HELLO, AB, CD, *b("!")], [([], "Hell")], 4, "stop"),
    "text before it in its token": ({"stop": ("\n",)}, [HELLO, ASK], [([HELLO], "Hello"), ([], "?")], 1, "stop"),
    "begins in one token, ends in the next": (
        {"stop": ("\n\nUser",)},
        [HELLO, DOT, *b("\nUser")],
        [([HELLO], "Hello"), ([], ".")],
        1,
        "stop",
    ),
    "a false start goes out with its id": (
        {"stop": ("\n\nUser",)},
        [DOT, AB, EOS],
        [([DOT, AB], ".\nAB"), ([EOS], "")],
        0,
        "stop",
    ),
    "a false start at eos": (
        {"stop": ("DEFG",)},
        [HELLO, *b("DE"), EOS],
        [([HELLO], "Hello"), ([*b("DE"), EOS], "DE")],
        0,
        "stop",
    ),
    "a false start at the last token": (
        {"stop": ("DEFG",), "max_tokens": 2},
        [*b("DE")],
        [(b("DE"), "DE")],
        0,
        "length",
    ),
    "a false start when cancelled": ({"stop": ("DEFG",)}, [*b("DE")], [(b("DE"), "DE")], 0, "cancelled"),
    "silence before a stop stays": (
        {"stop": ("AB",)},
        [HELLO, SILENT, AB],
        [([HELLO], "Hello"), ([SILENT], ""), ([], "")],
        0,
        "stop",
    ),
    "a stop with the last token": ({"stop": ("AB",), "max_tokens": 1}, [AB], [([], "")], 0, "stop"),
    "a stop before min_tokens": (
        {"stop": ("AB",), "min_tokens": 1},
        [AB, CD, AB],
        [([AB], "AB"), ([CD], "CD"), ([], "")],
        0,
        "stop",
    ),
    "a stop across min_tokens": (
        {"stop": ("ABCD",), "min_tokens": 1},
        [AB, CD],
        [([AB], "AB"), ([CD], "CD"), ([], "")],
        0,
        "cancelled",
    ),
    "a stop inside a mixed token": ({"stop": ("o ",)}, [HELLO, MIXED], [([], "Hell")], 4, "stop"),
    "nothing at all": ({}, [], [([], "")], 0, "cancelled"),
}


@pytest.mark.parametrize(("params", "ids", "shown", "unspelled", "reason"), CASES.values(), ids=CASES.keys())
def test_deltas(
    vocabulary: Vocabulary,
    params: dict[str, object],
    ids: list[int],
    shown: list[Shown],
    unspelled: int,
    reason: FinishReason,
) -> None:
    out = output(vocabulary, **params)
    limit = params.get("max_tokens")
    assert limit is None or isinstance(limit, int)
    deltas = drive(out, ids, limit=limit)
    assert [(list(delta.ids), delta.text) for delta in deltas] == shown
    assert [(delta.reason, delta.unspelled) for delta in deltas] == [(None, 0)] * (len(deltas) - 1) + [
        (reason, unspelled)
    ]
    assert {(delta.request_id, delta.index) for delta in deltas} == {("r", 3)}
    assert out.reason == reason


def decoded(vocabulary: Vocabulary, ids: list[int]) -> str:
    return b"".join(map(vocabulary.bytes_of, ids)).decode(errors="replace").replace("\0", "\ufffd")


@given(
    st.lists(st.sampled_from([*range(WORDS, WORDS + len(TEXTS)), SILENT, 0xC3, 0xA9, 0xF0, 0x9F, 0x41]), max_size=20),
    st.lists(st.sampled_from(["AB", "lo\n", "\n\n", "é", " é", "\ufffd", "AAAA"]), max_size=3),
    st.integers(0, 3),
    st.sampled_from([None, EOS]),
)
@settings(max_examples=500, deadline=None)
def test_ids_always_spell_the_text(
    vocabulary: Vocabulary, ids: list[int], stops: list[str], min_tokens: int, end: int | None
) -> None:
    out = output(vocabulary, stop=tuple(stops), min_tokens=min_tokens)
    deltas = drive(out, ids if end is None else [*ids, end])
    sent: list[int] = []
    text = ""
    for delta in deltas:
        sent += delta.ids
        text += delta.text
        assert decoded(vocabulary, [i for i in sent if i != EOS]) == text[: len(text) - delta.unspelled]
    body = [token for token in sent if token != EOS]
    assert body == ids[: len(body)]
    whole = decoded(vocabulary, ids)
    assert whole.startswith(text)
    if out.reason == "cancelled" or EOS in sent:
        # All of the text came out, but for a character that was never whole.
        assert whole[len(text) :] in ("", "\ufffd")


def test_only_what_may_become_a_stop_is_held(vocabulary: Vocabulary) -> None:
    text = "Here is the English alphabet: ABC"
    out = output(vocabulary, stop=("DEFGHIJ",))
    assert [delta.text for token in b(text) if (delta := out.push(token)) is not None] == list(text)
    assert [out.push(token) for token in b("DEFGHI")] == [None] * 6
    end = out.push(b("J")[0])
    assert end is not None
    assert (end.text, end.ids, end.reason) == ("", (), "stop")


def test_logprobs_go_with_their_ids(vocabulary: Vocabulary) -> None:
    def logprob(token: int) -> SampledLogprob:
        return SampledLogprob(TokenLogprob(token, vocabulary.bytes_of(token), -1.0), ())

    out = output(vocabulary, stop=("\n",))
    deltas = [out.push(token, logprob(token)) for token in [HELLO, *b("é"), ASK]]
    told = [[entry.sampled.id for entry in delta.logprobs] for delta in deltas if delta is not None]
    assert told == [[HELLO], b("é"), []]


@pytest.mark.parametrize("limit", range(1, 41))
def test_the_hard_text_cut_anywhere(default_codec: Codec, limit: int) -> None:
    ids = default_codec.encode(HARD).tolist()[:limit]
    request = GenerateRequest("r", np.ones(1, np.int32))
    out = ChoiceOutput(request, 0, default_codec.detokenizer(), default_codec.eos_ids, StopStrings(()))
    deltas = drive(out, ids, limit=limit)
    text = "".join(delta.text for delta in deltas)
    sent = [token for delta in deltas for token in delta.ids]
    assert HARD.startswith(text)
    assert "\ufffd" not in text
    assert text == default_codec.decode(ids).removesuffix("\ufffd")
    assert default_codec.decode(sent) == text[: len(text) - deltas[-1].unspelled]
    for delta in deltas:
        assert delta.text.encode().decode() == delta.text


@pytest.mark.parametrize("seed", range(10))
def test_a_stop_anywhere_in_the_hard_text(default_codec: Codec, seed: int) -> None:
    chance = random.Random(seed)
    start = chance.randrange(len(HARD))
    stop = HARD[start : start + chance.randint(1, 6)]
    request = GenerateRequest("r", np.ones(1, np.int32), SamplingParams(stop=(stop,)))
    out = ChoiceOutput(request, 0, default_codec.detokenizer(), default_codec.eos_ids, StopStrings((stop,)))
    deltas = drive(out, default_codec.encode(HARD).tolist())
    text = "".join(delta.text for delta in deltas)
    assert text == HARD[: HARD.index(stop)]
    assert out.reason == "stop"
    sent = [token for delta in deltas for token in delta.ids]
    assert default_codec.decode(sent) == text[: len(text) - deltas[-1].unspelled]
