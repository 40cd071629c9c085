"""Structured output: grammars to masks of allowed tokens, by the llguidance library, which is loaded at first use."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.api import Grammar
from engine.errors import InvalidRequest
from engine.lru import LruCache

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from engine.text.vocabulary import Vocabulary

MAX_SOURCE = 64 * 1024
"""The longest schema or regular expression, in characters."""

KEPT = 32
"""Compiled grammars that are kept for the next request."""

_WHITESPACE = r"\n? {0,32}"
"""Between the tokens of JSON. Unbounded, a small model can go on with blanks until its length runs out."""

_KEYWORDS = frozenset(
    {"not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"}
    | {"dependentSchemas", "dependentRequired", "dependencies", "unevaluatedItems", "unevaluatedProperties"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "$dynamicRef", "$dynamicAnchor", "$recursiveRef"}
)
"""Keywords of JSON Schema that the library may not know, and that a refusal may name."""


class GrammarError(Exception):
    """A grammar that cannot go on: it became too costly to follow, or was given a token that it does not allow."""


class GrammarCompiler:
    """Compiles the grammars of one model's requests. Safe to share between threads.

    The library's tokenizer is made of `vocabulary`, so that a mask speaks of the very bytes which the detokenizer will
    give out. Compiling takes 1 to 100 ms, within fixed limits; the first call makes the tokenizer as well, some 0.2 s.
    """

    def __init__(self, vocabulary: Vocabulary, eos_ids: frozenset[int], encode: Callable[[str], Sequence[int]]) -> None:
        """encode: a text to ids."""
        self._vocabulary = vocabulary
        self._eos_ids = sorted(eos_ids)
        self._encode = encode
        self._making_tokenizer = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: LruCache[Grammar, LLMatcher] = LruCache(KEPT)

    def matcher(self, grammar: Grammar) -> TokenMatcher:
        """A new matcher, at the beginning of its text. Raises InvalidRequest where the grammar cannot be used."""
        if len(grammar.source) > MAX_SOURCE:
            raise InvalidRequest(f"a grammar has at most {MAX_SOURCE} characters")
        return TokenMatcher(self._compiled.get(grammar, lambda: self._compile(grammar)).deep_copy())

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        if not self._eos_ids:
            raise InvalidRequest("this model names no token that ends a text, which a grammar needs")
        with self._making_tokenizer:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer(self._vocabulary, self._eos_ids, self._encode)
        matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=_limits())
        if matcher.is_error():
            raise InvalidRequest(_refusal(grammar, matcher.get_error()))
        return matcher


class TokenMatcher:
    """Where one sequence is in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self, size: int) -> npt.NDArray[np.bool_]:
        """Which of `size` ids may follow. Raises GrammarError."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():  # the mask would say that the text may end
            raise GrammarError("the grammar cannot be followed any further")
        allowed = np.zeros(size, dtype=np.bool_)
        known = np.unpackbits(bits, count=min(size, 8 * len(bits)), bitorder="little")
        allowed[: len(known)] = known
        return allowed

    def advance(self, token: int) -> None:
        """Goes on by a token; one that is not allowed shows in the next `allowed`."""
        self._matcher.consume_token(token)


class _TokenTable:
    """What llguidance asks of a tokenizer. Tokens without bytes are control tokens: no text can hold them."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos_id: int, encode: Callable[[str], Sequence[int]]) -> None:
        self.eos_token_id = eos_id
        self.tokens = [vocabulary.bytes_of(token) for token in range(len(vocabulary))]
        self.special_token_ids = [token for token, spelt in enumerate(self.tokens) if not spelt]
        self._encode = encode

    def __call__(self, text: str) -> Sequence[int]:
        return self._encode(text)


def _tokenizer(vocabulary: Vocabulary, eos_ids: list[int], encode: Callable[[str], Sequence[int]]) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    table = TokenizerWrapper(_TokenTable(vocabulary, eos_ids[0], encode))
    return LLTokenizer(table, n_vocab=len(vocabulary), eos_token=eos_ids)


def _limits() -> LLParserLimits:
    """A fraction of the library's own, so that no request takes long; a step has theirs, some 15 ms at the worst."""
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=200_000, max_lexer_states=50_000, max_grammar_size=100_000)


def _source(grammar: Grammar) -> str:
    """The library's own form. Raises InvalidRequest."""
    from llguidance import LLMatcher

    if grammar.kind == "json_schema" and not grammar.source.lstrip().startswith("{"):
        raise InvalidRequest("a JSON schema is an object")
    try:
        if grammar.kind == "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        schema = '{"type": "object"}' if grammar.kind == "json_object" else grammar.source
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE})
    except ValueError:  # also for text that is no Unicode
        raise InvalidRequest(f"the grammar of kind {grammar.kind} is not well formed, or nested too deeply") from None


def _refusal(grammar: Grammar, message: str) -> str:
    """The library's message without what it quotes of the request."""
    if grammar.kind == "regex":
        found = re.search(r"^error: ([A-Za-z ,<=-]+)", message, re.MULTILINE)
        return f"the regular expression cannot be used: {found[1] if found else 'it is too large, or not valid'}"
    first = message.partition("\n")[0]
    if first.startswith("Unimplemented keys"):
        named = [word for word in re.findall(r'"([^"]*)"', first) if word in _KEYWORDS]
        return f"the JSON schema uses keywords that are not supported{': ' if named else ''}{', '.join(named)}"
    reason = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "...", first).partition(":")[0]
    return f"the JSON schema cannot be used: {reason}"
