"""Prompts of exact lengths against a tokenizer that is only known by its counts."""

from __future__ import annotations

from random import Random

import pytest

from chatd.bench.client import connect
from chatd.bench.words import Prompts, find_prompts
from chatd.failure import CommandFailed
from tests.support.openai_server import FakeServer, serving


async def found(server: FakeServer) -> Prompts:
    with serving(server):
        async with connect(server.url) as client:
            return await find_prompts(client)


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("length", [24, 60, 500])
async def test_prompts_are_as_long_as_asked_and_begin_differently(system: bool, length: int) -> None:
    server = FakeServer(system=system, split=frozenset({"time", "world", "cost"}))
    prompts = await found(server)
    assert prompts.system == system
    assert not server.split & set(prompts.words)
    assert len(prompts.words) > 150
    random = Random(1)
    made = [prompts.of_length(length, random) for _ in range(20)]
    tokens = [server.tokens(list(messages)) for messages in made]  # type: ignore[arg-type]
    assert {len(each) for each in tokens} == {length}
    assert len({tuple(each[:6]) for each in tokens}) == 20


async def test_a_tokenizer_that_needs_no_halving_is_asked_twice() -> None:
    server = FakeServer()
    await found(server)
    assert len(server.bodies) == 1 + 2  # the greeting, the opening alone, all words
    assert [body["max_tokens"] for body in server.bodies] == [8, 1, 1]


async def test_a_prompt_shorter_than_the_template_is_refused() -> None:
    prompts = await found(FakeServer())
    least = prompts.overhead + 1
    system, user = prompts.of_length(least, Random(1))
    assert (len(system["content"].split()), user["content"]) == (2, "Words:")
    with pytest.raises(CommandFailed, match=f"has more than {least - 1} tokens"):
        prompts.of_length(least - 1, Random(1))


class SplitsAll(frozenset[str]):
    def __contains__(self, word: object) -> bool:
        return True


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (FakeServer(split=SplitsAll()), "splits common English words"),
        (FakeServer(usage=False), "the server tells no usage"),
        (FakeServer(refuse=lambda number: 503 if number > 3 else None, split=frozenset({"time"})), "HTTP 503"),
    ],
)
async def test_what_cannot_be_found_out(server: FakeServer, message: str) -> None:
    with pytest.raises(CommandFailed, match=message):
        await found(server)
