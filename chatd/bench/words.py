"""Prompts of an exact length in tokens, whatever the server's tokenizer: of words that are one token each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from chatd.bench.client import ChatClient, Message, RequestFailed
from chatd.failure import CommandFailed

_OPENING = "Words:"
_SYSTEM_WORDS = 8
_FEWEST_WORDS = 32
_SMALLEST_GROUP = 4
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea kid body information back parent face
others level office door health person art war history party result change morning reason research girl guy moment air
teacher force education foot boy age policy music market sense nation plan college interest death experience effect use
class control field development role effort rate heart drug show leader light voice wife police mind price report
decision son view town road arm difference value building action season society tax director position player record
paper space ground form event matter center couple site project activity star table need court oil situation cost
"""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes prompts of random words, which have only the opening of the chat template in common, and a word by chance.

    overhead: tokens of a prompt without words. system: whether the first words stand in a system message, because a
    template may put a text of its own before a conversation without one.
    """

    words: tuple[str, ...]
    overhead: int
    system: bool

    def of_length(self, tokens: int, random: Random) -> list[Message]:
        """Raises CommandFailed when the template alone has as many tokens."""
        if tokens <= self.overhead:
            raise CommandFailed(
                f"a prompt of this model has more than {self.overhead} tokens, and one of {tokens} was asked for: "
                "ask for longer ones (--scale, --history)"
            )
        words = random.choices(self.words, k=tokens - self.overhead)
        return _messages(words, self.system)

    def text(self, words: int, random: Random) -> str:
        return _text(random.choices(self.words, k=words))


async def find_prompts(client: ChatClient) -> Prompts:
    """Asks the server, by short prompts, which words are one token. Raises CommandFailed when they do not tell."""
    try:
        try:
            system, overhead = True, await _count(client, [], True)
        except RequestFailed:  # there are templates without system messages
            system, overhead = False, await _count(client, [], False)
        words = await _single_tokens(client, _WORDS.split(), overhead, system)
    except RequestFailed as error:
        raise CommandFailed(f"the length of prompts cannot be found out: {error}") from error
    if len(words) < _FEWEST_WORDS:
        raise CommandFailed("the model's tokenizer splits common English words: exact prompts cannot be made of them")
    return Prompts(tuple(words), overhead, system)


async def _single_tokens(client: ChatClient, words: Sequence[str], overhead: int, system: bool) -> list[str]:
    """Halves what has more tokens than words, and drops what is small then."""
    if await _count(client, words, system) == overhead + len(words):
        return list(words)
    if len(words) <= _SMALLEST_GROUP:
        return []
    half = len(words) // 2
    return [
        *await _single_tokens(client, words[:half], overhead, system),
        *await _single_tokens(client, words[half:], overhead, system),
    ]


async def _count(client: ChatClient, words: Sequence[str], system: bool) -> int:
    answer = await client.complete(_messages(words, system), 1)
    if answer.prompt_tokens is None:
        raise RequestFailed("the server tells no usage")
    return answer.prompt_tokens


def _messages(words: Sequence[str], system: bool) -> list[Message]:
    if not system:
        return [{"role": "user", "content": _text(words)}]
    return [
        {"role": "system", "content": _text(words[:_SYSTEM_WORDS])},
        {"role": "user", "content": _text(words[_SYSTEM_WORDS:])},
    ]


def _text(words: Sequence[str]) -> str:
    return " ".join((_OPENING, *words))
