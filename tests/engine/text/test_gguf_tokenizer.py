"""A tokenizer written into GGUF metadata comes back as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.api import SamplingParams
from engine.errors import ModelError
from engine.text import Codec, assets_from_gguf
from engine.text.api import ChatMessage
from engine.weights.gguf_tokenizer import tokenizer_from_gguf
from tests.engine.text.tiny_tokenizers import CHATML, Family, families

HARD = "Repeat exactly: 👨‍👩‍👧‍👦 🇯🇵 ďábelské 你好 한국어 é क्षि ﷽"
TEXTS = [
    "Hello there, it's 1 22 333 4444.",
    HARD,
    "a\n\n1  b\t\n c   ",
    "<|im_end|>x<|im_start|> [INST]y</s>",
    "",
    " x",
    "don'T I'LL",
]
CONTROL, USER_DEFINED, NORMAL, BYTE = 3, 4, 1, 6

WriteGguf = Callable[..., GGUFReader]


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """A file that holds only the given metadata."""

    def write(**keys: Any) -> GGUFReader:
        path = tmp_path / "model.gguf"
        writer = GGUFWriter(path, "llama")
        for name, value in keys.items():
            key = name.replace("__", ".")
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return GGUFReader(path)

    return write


def metadata(tokenizer: Tokenizer, kind: str) -> dict[str, Any]:
    """What a GGUF converter writes for this tokenizer; SentencePiece scores are the ranks of the merges."""
    parsed = json.loads(tokenizer.to_str())
    model = parsed["model"]
    by_id = {number: token for token, number in model["vocab"].items()}
    by_id |= {token["id"]: token["content"] for token in parsed["added_tokens"]}
    tokens = [by_id[number] for number in range(len(by_id))]
    added = {token["content"]: CONTROL if token["special"] else USER_DEFINED for token in parsed["added_tokens"]}
    types = [added.get(token, BYTE if kind == "llama" and token.startswith("<0x") else NORMAL) for token in tokens]
    keys: dict[str, Any] = {"model": kind, "tokens": tokens, "token_type": types}
    if kind == "gpt2":
        keys["merges"] = [" ".join(merge) for merge in model["merges"]]
    else:
        ranks = {"".join(merge): -float(rank) - 1 for rank, merge in reversed(list(enumerate(model["merges"])))}
        keys["scores"] = [ranks.get(token, -10000.0) for token in tokens]
        keys["unknown_token_id"] = model["vocab"]["<unk>"]
    return {f"tokenizer__ggml__{name}": value for name, value in keys.items()}


FAMILIES = {
    "llama 3": ("gpt2", {"tokenizer__ggml__pre": "llama-bpe"}),
    "chatml that drops reasoning": ("gpt2", {"tokenizer__ggml__pre": "llama-bpe"}),
    "mistral, tags as tokens, legacy": ("llama", {}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_it_encodes_as_the_original(write_gguf: WriteGguf, all_families: dict[str, Family], name: str) -> None:
    kind, more = FAMILIES[name]
    original = all_families[name].tokenizer
    read, _ = tokenizer_from_gguf(write_gguf(**metadata(original, kind), **more))

    @given(st.sampled_from(TEXTS) | st.text(st.characters(exclude_categories=["Cs"])))
    @settings(max_examples=150, deadline=None)
    def same(text: str) -> None:
        expected = original.encode(text, add_special_tokens=False).ids
        got = read.encode(text, add_special_tokens=False).ids
        assert got == expected
        assert read.decode(got, skip_special_tokens=False) == original.decode(expected, skip_special_tokens=False)

    same()


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 1234  x\n\ny", ["it", "'s", " 1234", " ", " x", "\n", "\n", "y"]),
        ("default", "A'B 12", ["A", "'", "B", " 12"]),
        ("smollm", "it's 1234\n\n5x", ["it", "'s", " ", "1", "2", "3", "4", "\n\n", "5", "x"]),
        ("llama-bpe", "IT'S 12345\n\n5x. \n", ["IT", "'S", " ", "123", "45", "\n\n", "5", "x", ".", " \n"]),
        ("qwen2", "it's 123\n\n(x)", ["it", "'s", " ", "1", "2", "3", "\n\n", "(x", ")"]),
        ("tekken", "helloWorld's 12//\n", ["hello", "World", "'s", " ", "1", "2", "//\n"]),
        ("gpt-4o", "helloWorld's 1234//\n", ["hello", "World's", " ", "123", "4", "//\n"]),
    ],
)
def test_pre_tokenizers(
    write_gguf: WriteGguf, all_families: dict[str, Family], pre: str, text: str, words: list[str]
) -> None:
    keys = metadata(all_families["chatml"].tokenizer, "gpt2")
    tokenizer, _ = tokenizer_from_gguf(write_gguf(**keys, tokenizer__ggml__pre=pre))
    assert [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer__ggml__pre": "martian-bpe"}, "martian-bpe"),
        ({"tokenizer__ggml__model": "t5"}, "'t5'"),
        ({"tokenizer__ggml__model": "llama"}, "scores"),
        ({"tokenizer__ggml__tokens": None}, "no tokenizer"),
    ],
)
def test_what_is_unknown_is_named(
    write_gguf: WriteGguf, all_families: dict[str, Family], changes: dict[str, Any], says: str
) -> None:
    keys = {**metadata(all_families["chatml"].tokenizer, "gpt2"), **changes}
    with pytest.raises(ModelError, match=says):
        tokenizer_from_gguf(write_gguf(**{name: value for name, value in keys.items() if value is not None}))


def test_the_facts_of_a_chat(write_gguf: WriteGguf) -> None:
    tokenizer = families()["chatml"].tokenizer
    end, end_of_text = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    assets = assets_from_gguf(
        write_gguf(
            **metadata(tokenizer, "gpt2"),
            tokenizer__chat_template=CHATML,
            tokenizer__ggml__pre="llama-bpe",
            tokenizer__ggml__eos_token_id=end,
            tokenizer__ggml__bos_token_id=5,
            tokenizer__ggml__add_bos_token=True,
            general__sampling__temp=0.5,
            general__sampling__top_k=40,
            general__sampling__penalty_repeat=1.5,
        )
    )
    assert assets.chat_template == CHATML
    assert assets.special_tokens == {"eos_token": "<|im_end|>", "bos_token": tokenizer.id_to_token(5)}
    assert assets.add_bos
    assert set(assets.eos_ids) == {end, end_of_text}
    assert assets.sampling == {"temperature": 0.5, "top_k": 40.0, "repetition_penalty": 1.5}
    codec = Codec(assets)
    assert codec.decode(codec.prompt([ChatMessage("user", HARD)]).tokens) == f"user\n{HARD}\nassistant\n"
    assert codec.default_params == SamplingParams(temperature=0.5, top_k=40, repetition_penalty=1.5)
