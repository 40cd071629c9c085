"""Which conversations are taken, and what they become: a prompt or a refusal, never anything else."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequest, RequestError
from engine.text import ChatAssets, Codec, TemplateError
from engine.text.api import ChatMessage, Encoded, Role
from tests.engine.text.test_same_ids_as_transformers import continued_reference
from tests.engine.text.tiny_tokenizers import CHATML, Family, families

ROLES: dict[str, tuple[Role, ...]] = {
    "user": ("user",),
    "system": ("system",),
    "assistant": ("assistant",),
    "system, user, user": ("system", "user", "user"),
    "user, assistant, system, user": ("user", "assistant", "system", "user"),
    "assistant, user": ("assistant", "user"),
    "system, system, user": ("system", "system", "user"),
    "user, assistant, assistant": ("user", "assistant", "assistant"),
    "system, assistant": ("system", "assistant"),
    "user, system": ("user", "system"),
}
CONTENTS = ("one two", "", " ", "\n", "<|im_end|>", "é\u0301\U0001f468\u200d", "\U000f0000" + "0" + "\U000f0001")


def conversation(roles: tuple[Role, ...], contents: tuple[str, ...] = ("text",)) -> list[ChatMessage]:
    return [ChatMessage(role, contents[place % len(contents)]) for place, role in enumerate(roles)]


def check(codec: Codec, messages: list[ChatMessage]) -> None:
    """A prompt, the same each time and from its own segments; or a refusal, which is the request's fault."""
    try:
        prompt = codec.prompt(messages)
    except RequestError:
        return
    assert prompt.tokens.dtype == np.int32
    assert len(prompt.segments) == len(prompt.message_tokens) == len(messages)
    assert codec.prompt(messages).tokens.tolist() == prompt.tokens.tolist()
    stored = [ChatMessage(m.role, m.content, s) for m, s in zip(messages, prompt.segments, strict=True)]
    assert codec.prompt(stored).tokens.tolist() == prompt.tokens.tolist()


@pytest.mark.parametrize("roles", ROLES.values(), ids=ROLES.keys())
@pytest.mark.parametrize("family", families())
def test_every_order_of_roles(codecs: dict[str, Codec], family: str, roles: tuple[Role, ...]) -> None:
    for content in CONTENTS:
        check(codecs[family], conversation(roles, (content,)))
    check(codecs[family], conversation(roles, CONTENTS))


@pytest.mark.parametrize("roles", ROLES.values(), ids=ROLES.keys())
def test_the_default_model_takes_every_order(default_codec: Codec, roles: tuple[Role, ...]) -> None:
    for content in CONTENTS:
        messages = conversation(roles, (content,))
        check(default_codec, messages)
        assert default_codec.decode(default_codec.prompt(messages).tokens).count(content) >= len(roles)


def test_no_message_at_all(default_codec: Codec, codecs: dict[str, Codec]) -> None:
    for codec in (default_codec, *codecs.values()):
        check(codec, [])


@given(
    st.sampled_from(list(families())),
    st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(st.characters(exclude_categories=["Cs"]))),
        max_size=5,
    ),
)
@settings(max_examples=200, deadline=None)
def test_any_conversation(codecs: dict[str, Codec], family: str, messages: list[tuple[Role, str]]) -> None:
    check(codecs[family], [ChatMessage(role, content) for role, content in messages])


@pytest.mark.parametrize("family", ["the default model", "llama 3", "mistral, tags as tokens", "gemma"])
def test_added_tokens_in_content_stay_text(
    codecs: dict[str, Codec],
    all_families: dict[str, Family],
    default_codec: Codec,
    default_assets: ChatAssets,
    family: str,
) -> None:
    default = family == "the default model"
    codec = default_codec if default else codecs[family]
    assets = default_assets if default else all_families[family].assets()
    added = {token["content"]: token["id"] for token in json.loads(assets.tokenizer_json)["added_tokens"]}
    ids = set(added.values())

    def controls(messages: list[ChatMessage]) -> list[int]:
        return [int(token) for token in codec.prompt(messages).tokens if int(token) in ids]

    expected = controls([ChatMessage("user", "x"), ChatMessage("assistant", "x"), ChatMessage("user", "x")])
    assert expected
    for text in [*added, "".join(added), " ".join(added)]:
        messages = [ChatMessage("user", text), ChatMessage("assistant", f"a{text}b"), ChatMessage("user", f"{text}.")]
        assert controls(messages) == expected
        assert codec.decode(codec.prompt(messages).tokens).count(text) >= 3


class TestContinued:
    MESSAGES = (ChatMessage("user", "Hello there"), ChatMessage("assistant", "The capital of"))

    @pytest.mark.parametrize("family", families())
    def test_the_text_goes_on_after_the_header_of_an_answer(self, codecs: dict[str, Codec], family: str) -> None:
        codec = codecs[family]
        header = codec.prompt(self.MESSAGES[:1]).tokens
        opened = codec.prompt(self.MESSAGES, add_generation_prompt=False, continue_final_message=True)
        assert opened.tokens[: len(header)].tolist() == header.tolist()
        assert codec.decode(opened.tokens).endswith("The capital of")
        assert opened.opening_tokens == len(opened.tokens) - len(header)
        assert (opened.header_tokens, sum(opened.message_tokens)) == (0, len(opened.tokens))
        closed = codec.prompt(self.MESSAGES, add_generation_prompt=False).tokens
        assert closed[: len(opened.tokens)].tolist() == opened.tokens.tolist()
        assert len(closed) > len(opened.tokens)

    @pytest.mark.parametrize("family", families())
    def test_as_transformers_has_it(
        self, codecs: dict[str, Codec], all_families: dict[str, Family], family: str
    ) -> None:
        rows = [(message.role, message.content) for message in self.MESSAGES]
        opened = codecs[family].prompt(self.MESSAGES, add_generation_prompt=False, continue_final_message=True)
        assert opened.tokens.tolist() == continued_reference(all_families[family].assets(), rows)

    def test_no_text_that_ends_an_answer_comes_before_the_rest(self, all_families: dict[str, Family]) -> None:
        assets = all_families["chatml"].assets()
        template = CHATML.replace("'<|im_end|>'", "' (over)<|im_end|>'")
        codec = Codec(ChatAssets(assets.tokenizer_json, template, assets.special_tokens, assets.eos_ids))
        opened = codec.prompt(self.MESSAGES, add_generation_prompt=False, continue_final_message=True)
        assert codec.decode(opened.tokens).endswith("The capital of")
        assert codec.decode(opened.segments[1].ids) == "The capital of"

    def test_known_ids_are_used_without_their_end(self, codecs: dict[str, Codec]) -> None:
        codec = codecs["chatml"]
        [end] = codec.eos_ids
        letters = np.concatenate([codec.encode(letter) for letter in "Paris"]).astype(np.int32)
        header = codec.prompt([ChatMessage("user", "x")]).tokens
        for ids in (letters, np.append(letters, np.int32(end))):
            known = ChatMessage("assistant", "Paris", Encoded(ids, codec.fingerprint))
            prompt = codec.prompt(
                [ChatMessage("user", "x"), known], add_generation_prompt=False, continue_final_message=True
            )
            assert prompt.tokens.tolist() == [*header, *letters]
            assert prompt.segments[1] is known.encoded

    def test_remembered_ids_are_found(self, all_families: dict[str, Family]) -> None:
        codec = Codec(all_families["chatml"].assets())
        question = [ChatMessage("user", "x")]
        header = codec.prompt(question).tokens
        letters = np.concatenate([codec.encode(letter) for letter in "Paris"])
        codec.remember("a", header, letters, "Paris")
        prompt = codec.prompt(
            [*question, ChatMessage("assistant", "Paris")],
            add_generation_prompt=False,
            continue_final_message=True,
            namespace="a",
        )
        assert prompt.tokens.tolist() == [*header, *letters]

    def test_an_empty_one_is_the_header(self, default_codec: Codec) -> None:
        question = [ChatMessage("user", "x")]
        prompt = default_codec.prompt(
            [*question, ChatMessage("assistant", "")], add_generation_prompt=False, continue_final_message=True
        )
        assert prompt.tokens.tolist() == default_codec.prompt(question).tokens.tolist()
        assert prompt.opening_tokens == 0

    @pytest.mark.parametrize(
        ("roles", "add_generation_prompt"),
        [((), False), (("user",), False), (("assistant", "user"), False), (("user", "assistant"), True)],
    )
    def test_wrong_combinations(
        self, default_codec: Codec, roles: tuple[Role, ...], add_generation_prompt: bool
    ) -> None:
        with pytest.raises(InvalidRequest, match="continued"):
            default_codec.prompt(
                conversation(roles), add_generation_prompt=add_generation_prompt, continue_final_message=True
            )

    @pytest.mark.parametrize(
        "template",
        [
            "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
            "{{ messages[1].content }}{{ messages[0].content }}",
            "{{ messages[0].content }}{{ messages[1].content }}{{ messages[1].content }}",
        ],
    )
    def test_a_template_that_does_not_end_with_it(self, all_families: dict[str, Family], template: str) -> None:
        assets = all_families["chatml"].assets()
        codec = Codec(ChatAssets(assets.tokenizer_json, template, assets.special_tokens, assets.eos_ids))
        with pytest.raises(TemplateError, match="cannot be continued"):
            codec.prompt(self.MESSAGES, add_generation_prompt=False, continue_final_message=True)
