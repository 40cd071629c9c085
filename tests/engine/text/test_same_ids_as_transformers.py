"""Benign conversations give exactly the ids of transformers' apply_chat_template."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from engine.text import ChatAssets, Codec, TemplateError
from engine.text.api import ChatMessage, Role
from tests.engine.text.tiny_tokenizers import Family, families

HARD = "Repeat exactly: 👨‍👩‍👧‍👦 🇯🇵 ďábelské 你好 한국어 é क्षि ﷽"
CONVERSATIONS: dict[str, list[tuple[Role, str]]] = {
    "one question": [("user", "Hello there")],
    "three turns": [
        ("user", "What is the capital of France?"),
        ("assistant", "The capital of France is Paris."),
        ("user", "Thanks!\n\nAnd 4444?"),
        ("assistant", "1 22 333.\nDone"),
        ("user", HARD),
    ],
    "a system text": [
        ("system", "You are a helpful assistant."),
        ("user", "Hello"),
        ("assistant", "Hi"),
        ("user", "So?"),
    ],
    "whitespace around": [
        ("user", "  two before, three after   "),
        ("assistant", "fine\n"),
        ("user", "\n\nnewlines\t"),
    ],
    "empty content": [("user", ""), ("assistant", "What?"), ("user", "")],
    "consecutive roles": [
        ("user", "one"),
        ("user", "two"),
        ("assistant", "three"),
        ("assistant", "four"),
        ("user", "five"),
    ],
    "a late system text": [("user", "one"), ("assistant", "two"), ("system", "Be brief."), ("user", "three")],
    "reasoning": [
        ("user", "one"),
        ("assistant", "<think>\nhm\n</think>\n\ntwo"),
        ("user", "three"),
        ("assistant", "no thoughts"),
        ("user", "four"),
    ],
    "code": [
        ("user", "def main():\n    return 'Hello, world'\n"),
        ("assistant", "indented:\n    x"),
        ("user", "x = [1,2]"),
    ],
}


def reference(assets: ChatAssets, messages: list[tuple[Role, str]], *, prompt: bool) -> list[int]:
    return _apply_chat_template(assets, messages, add_generation_prompt=prompt)


def continued_reference(assets: ChatAssets, messages: list[tuple[Role, str]]) -> list[int]:
    return _apply_chat_template(assets, messages, continue_final_message=True)


def _apply_chat_template(assets: ChatAssets, messages: list[tuple[Role, str]], **options: bool) -> list[int]:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(assets.tokenizer_json),
        chat_template=assets.chat_template,
        **assets.special_tokens,
    )
    rows = [{"role": role, "content": content} for role, content in messages]
    ids: list[int] = tokenizer.apply_chat_template(rows, return_dict=True, sanitize_control_tokens=False, **options)[
        "input_ids"
    ]
    return ids


def refuses(codec: Codec, assets: ChatAssets, messages: list[tuple[Role, str]]) -> bool:
    """Both refuse, or neither does."""
    try:
        codec.prompt([ChatMessage(role, content) for role, content in messages])
    except TemplateError:
        with pytest.raises(Exception, match=r"alternate|not supported"):
            reference(assets, messages, prompt=True)
        return True
    return False


def assert_same(codec: Codec, assets: ChatAssets, messages: list[tuple[Role, str]]) -> None:
    if refuses(codec, assets, messages):
        return
    for prompt in (True, False):
        got = codec.prompt([ChatMessage(role, text) for role, text in messages], add_generation_prompt=prompt)
        assert got.tokens.tolist() == reference(assets, messages, prompt=prompt)
        assert sum(got.message_tokens) + got.header_tokens == len(got.tokens)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", families())
def test_families(codecs: dict[str, Codec], all_families: dict[str, Family], family: str, conversation: str) -> None:
    assert_same(codecs[family], all_families[family].assets(), CONVERSATIONS[conversation])


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_default_model(default_codec: Codec, default_assets: ChatAssets, conversation: str) -> None:
    assert_same(default_codec, default_assets, CONVERSATIONS[conversation])
