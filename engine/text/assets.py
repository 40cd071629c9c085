"""What a model says about its text: the tokenizer, the chat template and the ids that end a reply."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ModelError
from engine.json_file import read_json_object

if TYPE_CHECKING:
    from gguf import GGUFReader

TOKENIZER_FILE = "tokenizer.json"
CHAT_FILE = "chat.json"
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ChatAssets:
    """tokenizer_json: a tokenizer.json of the `tokenizers` library. chat_template None: the model brings none.

    special_tokens: the names a template may use (bos_token, eos_token, ...) and their text. eos_ids: every id that the
    model's files name as an end. add_bos: plain text, outside a chat, begins with the bos token. sampling: the model's
    own defaults among temperature, top_p, top_k, min_p, repetition_penalty and max_tokens.
    """

    tokenizer_json: str = field(repr=False)
    chat_template: str | None
    special_tokens: dict[str, str]
    eos_ids: tuple[int, ...]
    add_bos: bool = False
    sampling: dict[str, float] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and chat.json into an existing folder."""
        facts = asdict(self)
        (folder / TOKENIZER_FILE).write_text(facts.pop("tokenizer_json"), encoding="utf-8")
        (folder / CHAT_FILE).write_text(json.dumps(facts, ensure_ascii=False, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> ChatAssets:
        """Reads what `save` wrote. Raises ModelError where a file is missing or broken."""
        facts = read_json_object(folder / CHAT_FILE)
        try:
            facts["eos_ids"] = tuple(facts["eos_ids"])
            return cls(tokenizer_json=(folder / TOKENIZER_FILE).read_text(encoding="utf-8"), **facts)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{folder / CHAT_FILE} or {TOKENIZER_FILE} beside it cannot be read: {error!r}") from error


def assets_from_gguf(reader: GGUFReader) -> ChatAssets:
    """Everything this package needs of a GGUF file. Raises ModelError for a tokenizer that is not known."""
    from engine.weights.gguf_tokenizer import tokenizer_from_gguf  # only conversion needs it, and it loads gguf

    tokenizer, facts = tokenizer_from_gguf(reader)
    return ChatAssets(
        tokenizer_json=tokenizer.to_str(),
        chat_template=facts["chat_template"],
        special_tokens=facts["special_tokens"],
        eos_ids=facts["eos_ids"],
        add_bos=facts["add_bos"],
        sampling=facts["sampling"],
    )


def assets_from_folder(folder: Path) -> ChatAssets:
    """Reads a folder of safetensors: tokenizer.json, tokenizer_config.json, chat_template.jinja (or .json),
    special_tokens_map.json, generation_config.json and config.json. Where there is no tokenizer.json, transformers
    converts the tokenizer.

    Raises ModelError where neither gives a tokenizer.
    """
    config = _read_optional(folder / "tokenizer_config.json")
    named = {**_read_optional(folder / "special_tokens_map.json"), **config}
    special = {name: text for name in _SPECIAL_NAMES if (text := _token_text(named.get(name))) is not None}
    tokenizer_json = _tokenizer_json(folder)
    return ChatAssets(
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(folder, config),
        special_tokens=special,
        eos_ids=_eos_ids(folder, tokenizer_json, special.get("eos_token")),
        add_bos=bool(config.get("add_bos_token", False)),
        sampling=_sampling(_read_optional(folder / "generation_config.json")),
    )


def _tokenizer_json(folder: Path) -> str:
    path = folder / TOKENIZER_FILE
    if path.exists():
        return path.read_text(encoding="utf-8")
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return str(converted.backend_tokenizer.to_str())
    except Exception as error:  # the library raises whatever its many converters raise
        raise ModelError(f"{folder} has no {TOKENIZER_FILE}, and its tokenizer cannot be converted: {error}") from error


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = _read_optional(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _eos_ids(folder: Path, tokenizer_json: str, eos_token: str | None) -> tuple[int, ...]:
    config = _read_optional(folder / "config.json")
    named = [_read_optional(folder / "generation_config.json"), config, config.get("text_config") or {}]
    ids = {number for source in named for number in _as_ids(source.get("eos_token_id"))}
    if eos_token is not None:
        tokenizer = json.loads(tokenizer_json)
        ids |= {token["id"] for token in tokenizer.get("added_tokens", ()) if token["content"] == eos_token}
        vocabulary = tokenizer["model"].get("vocab")
        if isinstance(vocabulary, dict) and eos_token in vocabulary:
            ids.add(vocabulary[eos_token])
    return tuple(sorted(ids))


def _sampling(generation: dict[str, Any]) -> dict[str, float]:
    """The defaults of generation_config.json; `do_sample: false` there means greedy, with the penalty as it is."""
    named = {name: generation.get(name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    given = {name: float(value) for name, value in named.items() if isinstance(value, int | float)}
    if generation.get("do_sample") is False:
        return {"temperature": 0.0} | {name: value for name, value in given.items() if name == "repetition_penalty"}
    return given


def _as_ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _token_text(value: object) -> str | None:
    """A token as the files write it: its text, or a table with the text under `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}
