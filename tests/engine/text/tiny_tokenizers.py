"""Small trained tokenizers of the families that chat models use, with chat templates in their styles."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from engine.text import ChatAssets

CORPUS = [
    "Hello there, how are you today? I am fine, thanks. What is the capital of France? The capital of France is Paris.",
    "You are a helpful assistant. The user asks, the assistant answers; system. \n\n  Numbers: 1 22 333 4444.",
    "def main():\n    return 'Hello, world'\n\nJe suis là, příliš žluťoučký kůň, 한국어 안녕하세요, 日本語のテキスト。",
] * 4

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    + CHATML
)
CHATML_REASONING = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- set content = m.content -%}
{%- if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in content -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for m in rest %}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if m['role'] == 'user' %}
        {%- if loop.last and system is defined %}
            {{- '[INST] ' + system + '\\n\\n' + m['content'] + ' [/INST]' }}
        {%- else %}
            {{- '[INST] ' + m['content'] + ' [/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + m['content'] + eos_token }}
    {%- endif %}
{%- endfor %}"""
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Family:
    """What a family of models brings: tokenizer, template, special tokens."""

    tokenizer: Tokenizer
    template: str | None
    special_tokens: dict[str, str]

    def assets(self) -> ChatAssets:
        eos = self.special_tokens.get("eos_token")
        ids = () if eos is None else (self.tokenizer.token_to_id(eos),)
        return ChatAssets(self.tokenizer.to_str(), self.template, self.special_tokens, ids)


def byte_level(added: list[AddedToken | str], *, ignore_merges: bool = False) -> Tokenizer:
    """Byte-level BPE behind a Llama-3 style regex; added tokens that are plain strings are special."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) if isinstance(t, str) else t for t in added])
    return tokenizer


def sentencepiece(added: list[str], *, legacy: bool) -> Tokenizer:
    """BPE with byte fallback; U+2581 begins a word. legacy: it begins every text between control tokens as well, else
    only the prompt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=tokens, show_progress=False)
    tokenizer.train_from_iterator([line for text in CORPUS for line in text.split("\n")], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    bpe = models.BPE(model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in ["<unk>", "<s>", "</s>", *added]]
    )
    return tokenizer


def families() -> dict[str, Family]:
    chatml = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    think = [AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")]
    llama3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    phi = [
        AddedToken(f"<|{name}|>", special=True, normalized=False, rstrip=True)
        for name in ("system", "user", "assistant", "end")
    ]
    s = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return {
        "chatml": Family(byte_level(chatml), CHATML, {"eos_token": "<|im_end|>"}),
        "chatml with a default system text": Family(
            byte_level(chatml), CHATML_DEFAULT_SYSTEM, {"eos_token": "<|im_end|>"}
        ),
        "chatml that drops reasoning": Family(
            byte_level([*chatml, *think]), CHATML_REASONING, {"eos_token": "<|im_end|>"}
        ),
        "llama 3": Family(
            byte_level(llama3, ignore_merges=True),
            LLAMA3,
            {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        ),
        "mistral, tags as text, legacy": Family(sentencepiece([], legacy=True), MISTRAL, s),
        "mistral, tags as text": Family(sentencepiece([], legacy=False), MISTRAL, s),
        "mistral, tags as tokens, legacy": Family(sentencepiece(["[INST]", "[/INST]"], legacy=True), MISTRAL, s),
        "mistral, tags as tokens": Family(sentencepiece(["[INST]", "[/INST]"], legacy=False), MISTRAL, s),
        "mistral, byte-level": Family(byte_level(["<s>", "</s>", "[INST]", "[/INST]"]), MISTRAL, s),
        "phi 3, tags swallow whitespace": Family(byte_level(phi), PHI3, {"eos_token": "<|end|>"}),
        "gemma": Family(sentencepiece(["<start_of_turn>", "<end_of_turn>"], legacy=False), GEMMA, s),
    }
