"""What a folder says about its chat, in all the places where models write it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from engine.errors import ModelError
from engine.text import ChatAssets, Codec, assets_from_folder
from tests.engine.text.tiny_tokenizers import CHATML, Family


@pytest.fixture
def folder(tmp_path: Path, all_families: dict[str, Family]) -> Path:
    all_families["chatml"].tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"chat_template": "a"}}, "a"),
        ({"tokenizer_config.json": {"chat_template": "a"}, "chat_template.jinja": "b"}, "b"),
        ({"chat_template.json": {"chat_template": "c"}}, "c"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
                }
            },
            "d",
        ),
    ],
)
def test_template(folder: Path, files: dict[str, Any], template: str | None) -> None:
    write(folder, files)
    assert assets_from_folder(folder).chat_template == template


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({}, set()),
        ({"config.json": {"eos_token_id": 5}}, {5}),
        ({"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": [6, 7]}}, {5, 6, 7}),
        ({"config.json": {"eos_token_id": None, "text_config": {"eos_token_id": 8}}}, {8}),
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}, "config.json": {"eos_token_id": 5}}, {5, "<|im_end|>"}),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|im_end|>", "lstrip": False}}}, {"<|im_end|>"}),
        ({"special_tokens_map.json": {"eos_token": "<|endoftext|>"}}, {"<|endoftext|>"}),
    ],
)
def test_eos_is_all_that_any_file_names(
    folder: Path, all_families: dict[str, Family], files: dict[str, Any], eos: set[int | str]
) -> None:
    write(folder, files)
    tokenizer = all_families["chatml"].tokenizer
    expected = {tokenizer.token_to_id(token) if isinstance(token, str) else token for token in eos}
    assert set(assets_from_folder(folder).eos_ids) == expected


@pytest.mark.parametrize(
    ("generation", "sampling"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eta": 5}, {"temperature": 0.6, "top_p": 0.9}),
        (
            {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05, "top_p": None},
            {"top_k": 20.0, "min_p": 0.05, "repetition_penalty": 1.05},
        ),
        ({"top_k": -1}, {"top_k": -1.0}),
        ({"do_sample": False, "temperature": None, "top_p": 0.9}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
    ],
)
def test_sampling_defaults(folder: Path, generation: dict[str, Any], sampling: dict[str, float]) -> None:
    write(folder, {"generation_config.json": generation})
    assets = assets_from_folder(folder)
    assert assets.sampling == sampling
    params = Codec(assets).default_params
    used = {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert used == {**neutral, **sampling, "top_k": max(0, sampling.get("top_k", 0))}


def test_sampling_defaults_out_of_range_are_named(folder: Path) -> None:
    write(folder, {"generation_config.json": {"repetition_penalty": 50}})
    with pytest.raises(ModelError, match="repetition_penalty"):
        _ = Codec(assets_from_folder(folder)).default_params


def test_saved_and_loaded(folder: Path, tmp_path: Path) -> None:
    write(
        folder, {"tokenizer_config.json": {"chat_template": CHATML, "eos_token": "<|im_end|>", "add_bos_token": True}}
    )
    assets = assets_from_folder(folder)
    copy = tmp_path / "copy"
    copy.mkdir()
    assets.save(copy)
    assert ChatAssets.load(copy) == assets
    assert Codec(ChatAssets.load(copy)).fingerprint == Codec(assets).fingerprint


@pytest.mark.parametrize("broken", ["", "[]", "{}", '{"eos_ids": []}', '{"eos_ids": [], "unknown": 1}'])
def test_a_broken_copy_is_a_model_error(folder: Path, broken: str) -> None:
    write(folder, {"chat.json": broken})
    with pytest.raises(ModelError, match=r"chat\.json"):
        ChatAssets.load(folder)


def test_a_folder_without_any_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": {"model_type": "llama"}})
    with pytest.raises(ModelError, match="tokenizer"):
        assets_from_folder(tmp_path)


def test_a_slow_tokenizer_is_converted(tmp_path: Path) -> None:
    vocabulary = {token: number for number, token in enumerate(["<|endoftext|>", "H", "i", "Hi", "Ġ"])}
    write(
        tmp_path,
        {
            "vocab.json": vocabulary,
            "merges.txt": "#version: 0.2\nH i\n",
            "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"},
            "config.json": {"model_type": "gpt2"},
        },
    )
    assets = assets_from_folder(tmp_path)
    assert Codec(assets).encode("Hi").tolist() == [3]
    assert assets.eos_ids == (0,)


def test_what_transformers_saves_is_read(tmp_path: Path, all_families: dict[str, Family]) -> None:
    family = all_families["llama 3"]
    saved = PreTrainedTokenizerFast(
        tokenizer_object=family.tokenizer, chat_template=family.template, **family.special_tokens
    )
    saved.save_pretrained(tmp_path)
    assets = assets_from_folder(tmp_path)
    assert assets.chat_template == family.template
    assert assets.special_tokens == family.special_tokens


def test_it_loads_neither_torch_nor_transformers() -> None:
    heavy = "{'torch', 'transformers', 'gguf'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"import sys, engine.text; sys.exit(bool({heavy}))"], check=True)
