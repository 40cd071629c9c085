"""The policies `window` and `error`, by hand and over many turns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest

from engine.api import SamplingParams
from engine.text.api import ChatMessage
from sessions import ContextCut, ContextOverflow, Message
from sessions.context import Budget, fit
from sessions.transcript import Conversation, StoredMessage
from tests.sessions.letters_codec import LettersCodec
from tests.sessions.rig import OWNER, Rig
from tests.sessions.scripted_engine import ScriptedEngine

OpenRig = Callable[..., Awaitable[Rig]]
NOW = datetime(2026, 1, 1, tzinfo=UTC)
SYSTEM = ChatMessage("system", "SYS")


def path(*texts: str, failed: Sequence[int] = ()) -> list[StoredMessage]:
    """user, assistant, user, ... named m0, m1, ...; the indices in `failed` are replies that failed."""
    return [
        StoredMessage(
            Message(
                id=f"m{place}",
                session_id="s",
                parent_id=f"m{place - 1}" if place else None,
                role="assistant" if place % 2 else "user",
                content=text,
                status="failed" if place in failed else "complete",
                finish_reason=None,
                usage=None,
                timings=None,
                created_at=NOW,
            ),
            None,
        )
        for place, text in enumerate(texts)
    ]


def seen(messages: Sequence[StoredMessage], budget: int, policy: str = "window") -> tuple[str, ContextCut | None]:
    codec = LettersCodec()
    fitted = fit(policy, codec, Conversation(SYSTEM, messages, NOW), Budget(budget, 0))
    assert fitted.transcript.tokens <= budget
    return codec.decode(fitted.transcript.prompt.tokens), fitted.cut


# A user message of four letters costs 12 ids, such a reply 17, the system prompt 13, the header of the new reply 11.
WHOLE = ("u" * 4, "a" * 4) * 4 + ("last",)
ALL = 13 + 4 * (12 + 17) + 12 + 11


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (ALL, 9),
        (ALL - 1, 3),
        (130, 3),
        (129, 1),
        (50, 1),
        (36, 1),
    ],
)
def test_whole_turns_go_down_to_half_of_the_budget(budget: int, kept: int) -> None:
    text, cut = seen(path(*WHOLE), budget)
    contents = "".join(
        f"{'assistant' if place % 2 else 'user'}\n{content}\n" for place, content in list(enumerate(WHOLE))[9 - kept :]
    )
    assert text == f"system\nSYS\n{contents}assistant\n"
    if kept == 9:
        assert cut is None
    else:
        dropped_tokens = ALL - (13 + kept // 2 * 29 + 23)
        assert cut == ContextCut(f"m{9 - kept}", 9 - kept, dropped_tokens)


@pytest.mark.parametrize("messages", [path("u" * 4, "a" * 4, "u" * 200), path("u" * 200)])
def test_what_cannot_fit_is_an_error_with_the_numbers(messages: list[StoredMessage]) -> None:
    least = 13 + 208 + 11
    with pytest.raises(ContextOverflow) as caught:
        fit("window", LettersCodec(), Conversation(SYSTEM, messages, NOW), Budget(least + 9, 10))
    assert (caught.value.prompt_tokens, caught.value.reserve, caught.value.limit) == (least, 10, least + 9)


def test_a_cut_may_part_joined_user_messages() -> None:
    messages = path("u" * 50, "half", "v" * 50, "half", "w" * 50, failed=(1, 3))
    text, cut = seen(messages, 100)
    assert text == f"system\nSYS\nuser\n{'w' * 50}\nassistant\n"
    assert cut is not None
    assert (cut.first_kept, cut.dropped_messages) == ("m4", 4)


def test_an_inherited_cut_holds_until_it_overflows_again() -> None:
    messages = path(*WHOLE)
    _, cut = seen(messages, 130)
    messages[8] = replace(messages[8], message=replace(messages[8].message, cut=cut))
    longer = [*messages, *path(*WHOLE, "b" * 4, "next")[9:]]
    text, again = seen(longer, 130)
    assert again is None
    assert text.count("user\n") == 3
    longest = [*longer, *path(*WHOLE, "b" * 4, "next", "c" * 40, "more")[11:]]
    text, again = seen(longest, 130)
    assert cut is not None
    assert again is not None
    assert (again.first_kept, again.dropped_messages) == ("m12", 12)
    assert again.dropped_tokens > cut.dropped_tokens


@pytest.mark.parametrize(("budget", "fits"), [(ALL, True), (ALL - 1, False)])
def test_the_policy_error_never_trims(budget: int, fits: bool) -> None:
    if fits:
        assert seen(path(*WHOLE), budget, "error")[1] is None
    else:
        with pytest.raises(ContextOverflow):
            seen(path(*WHOLE), budget, "error")


@pytest.mark.parametrize(
    ("context_length", "num_pages", "max_tokens", "limit", "reserve"),
    [
        (8192, 1024, None, 8192, 1024),
        (2048, 1024, None, 2048, 512),
        (8192, 64, None, 1024, 256),
        (8192, 1024, 100, 8192, 100),
        (8192, 1024, 0, 8192, 0),
    ],
)
def test_the_budget_is_the_limit_less_the_reserve(
    context_length: int, num_pages: int, max_tokens: int | None, limit: int, reserve: int
) -> None:
    info = ScriptedEngine(context_length=context_length, num_pages=num_pages).info
    budget = Budget.of(info, SamplingParams(max_tokens=max_tokens))
    assert (budget.limit, budget.reserve, budget.tokens) == (limit, reserve, limit - reserve)


async def test_over_many_turns_the_prefix_is_stable_between_rare_cuts(open_rig: OpenRig) -> None:
    rig = await open_rig(ScriptedEngine(context_length=800, reply=lambda request: "answer " * 4))
    session = await rig.session(system_prompt="SYS")
    notices = rig.broker.subscribe(session.id)
    cuts, so_far = 0, np.asarray([], dtype=np.int32)
    for number in range(30):
        turn = await rig.send(session, f"question {number:02}")
        await rig.log(turn)
        live = rig.engine.latest
        assert len(live.request.tokens) <= 600
        if turn.message.cut is None:
            assert np.array_equal(live.request.tokens[: len(so_far)], so_far)
        else:
            cuts += 1
            assert len(live.request.tokens) <= 300
        so_far = np.concatenate([live.request.tokens, np.asarray(live.output, dtype=np.int32)])
        assert rig.engine.codec.decode(live.request.tokens).startswith("system\nSYS\nuser\nquestion")
    assert 2 <= cuts <= 8
    messages = await rig.sessions.messages(OWNER, session.id)
    assert len(messages) == 60
    stored = [message.cut for message in messages if message.cut]
    assert len(stored) == cuts
    assert all(messages[cut.dropped_messages].id == cut.first_kept for cut in stored)
    assert [cut.dropped_messages for cut in stored] == sorted({cut.dropped_messages for cut in stored})
    notices.close()


async def test_a_cut_is_told_to_subscribers(open_rig: OpenRig) -> None:
    rig = await open_rig(ScriptedEngine(context_length=400, reply=lambda request: "a" * 60))
    session = await rig.session()
    for text in ("one", "two"):
        await rig.log(await rig.send(session, text * 20))
    notices = rig.broker.subscribe(session.id)
    turn = await rig.send(session, "three" * 12)
    types = [(event.type, event.data) for event in [await anext(notices) for _ in range(3)]]
    cut = turn.message.cut
    assert cut is not None
    assert types[1] == (
        "context.trimmed",
        {"dropped_messages": cut.dropped_messages, "dropped_tokens": cut.dropped_tokens},
    )


async def test_a_branch_from_before_a_cut_does_not_inherit_it(open_rig: OpenRig) -> None:
    rig = await open_rig(ScriptedEngine(context_length=400, reply=lambda request: "a" * 60))
    session = await rig.session()
    first = await rig.send(session, "one" * 20)
    await rig.log(first)
    while (turn := await rig.send(session, "more" * 12)).message.cut is None:
        await rig.log(turn)
    await rig.log(turn)
    branch = await rig.turns.start(OWNER, session.id, content="branch", parent_id=first.reply.id)
    assert branch.message.cut is None
    assert rig.engine.codec.decode(rig.engine.latest.request.tokens).startswith("user\noneone")
