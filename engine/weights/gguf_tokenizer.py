"""The tokenizer and the chat facts of a GGUF file, from its own metadata."""

from __future__ import annotations

from typing import Any

from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.errors import ModelError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<|eot|>",
    "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>",
    "</s>",
)
"""Control tokens that mean "the reply is over" wherever a vocabulary has them."""

_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_LLAMA3 = _SUFFIXES + _WORDS + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2 = _SUFFIXES + _WORDS + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_TEKKEN = f"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*" + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
_GPT4O = (
    f"{_BEFORE}{_UPPER}*{_LOWER}+{_SUFFIXES}?|{_BEFORE}{_UPPER}+{_LOWER}*{_SUFFIXES}?"
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    + _TAIL
)

_REGEXES = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "dbrx": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
}
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"})
_COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen"})
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
_GPT2 = frozenset({"default", "gpt-2", "phi-2", "olmo", "mpt", "jais"})


def tokenizer_from_gguf(reader: GGUFReader) -> tuple[Tokenizer, dict[str, Any]]:
    """The fast tokenizer, and {chat_template, special_tokens, eos_ids, add_bos, sampling}.

    GGUF has no generation config, so eos_ids joins the file's eos, eot and eom ids and the well-known end tokens.
    Raises ModelError, naming it, for a tokenizer model or pre-tokenizer that is not known.
    """
    kind = _read(reader, "model")
    tokens: list[str] = _read(reader, "tokens")
    if kind is None or tokens is None:
        raise ModelError("this GGUF file has no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens)")
    types: list[int] = _read(reader, "token_type") or [_NORMAL] * len(tokens)
    if kind == "gpt2":
        tokenizer = _byte_level_bpe(reader, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece_bpe(reader, tokens, types)
    else:
        raise ModelError(
            f"the GGUF tokenizer model {kind!r} is not supported: gpt2 (BPE) and llama (SentencePiece) are"
        )
    added = [
        AddedToken(tokens[number], special=types[number] == _CONTROL, normalized=False)
        for number in range(len(tokens))
        if types[number] in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer, _facts(reader, tokens, types)


def _byte_level_bpe(reader: GGUFReader, tokens: list[str]) -> Tokenizer:
    pre = _read(reader, "pre") or "default"
    merges = [tuple(merge.split(" ", 1)) for merge in _read(reader, "merges") or []]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in _REGEXES:
        words = pre_tokenizers.Split(Regex(_REGEXES[pre]), behavior="isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _SINGLE_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if pre in _GPT2:
        return gpt2
    raise ModelError(
        f"the GGUF pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not known, so its text cannot be split as in training"
    )


def _sentencepiece_bpe(reader: GGUFReader, tokens: list[str], types: list[int]) -> Tokenizer:
    scores: list[float] | None = _read(reader, "scores")
    if scores is None:
        raise ModelError("this GGUF file has a SentencePiece vocabulary without scores (tokenizer.ggml.scores)")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = _read(reader, "unknown_token_id")
    model = models.BPE(
        vocabulary,
        _merges_by_score(vocabulary, scores, types),
        unk_token=tokens[unknown] if unknown is not None else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = _read(reader, "add_space_prefix") is not False
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_by_score(vocabulary: dict[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose join scores best: so merges rank by the score of what they make."""
    usable = {token for token, number in vocabulary.items() if types[number] == _NORMAL}
    ranked = []
    for token in usable:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in usable and right in usable:
                ranked.append((-scores[vocabulary[token]], vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _facts(reader: GGUFReader, tokens: list[str], types: list[int]) -> dict[str, Any]:
    ids = {name: _read(reader, f"{key}_token_id") for name, key in _NAMES.items()}
    special = {name: tokens[number] for name, number in ids.items() if number is not None and number < len(tokens)}
    ends = {_read(reader, f"{key}_token_id") for key in ("eos", "eot", "eom")} - {None}
    ends |= {number for number, token in enumerate(tokens) if types[number] == _CONTROL and token in _ENDS}
    template = reader.fields.get("tokenizer.chat_template")
    return {
        "chat_template": template.contents() if template is not None else None,
        "special_tokens": special,
        "eos_ids": tuple(sorted(ends)),
        "add_bos": bool(_read(reader, "add_bos_token")),
        "sampling": {
            name: float(field.contents())
            for name, key in _SAMPLING.items()
            if (field := reader.fields.get(f"general.sampling.{key}")) is not None
        },
    }


_SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _read(reader: GGUFReader, name: str) -> Any:
    field = reader.fields.get(f"tokenizer.ggml.{name}")
    return field.contents() if field is not None else None
