"""chatd bench serve: sessions that talk with a server over many turns."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from chatd.commands.arguments import natural, positive, seconds
from chatd.commands.bench_load import Target, add_outputs, add_target, publish, run_load

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from chatd.bench.client import ChatClient
    from chatd.bench.load import Load

HELP = "conversations over many turns with a server: TTFT by turn, TPOT, throughput, hit rate"


def add_parser(parts: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = parts.add_parser("serve", help=HELP, description=HELP, allow_abbrev=False)
    add = parser.add_argument
    add("--sessions", type=positive, default=8, metavar="N", help="conversations (default: 8)")
    add("--turns", type=positive, default=6, metavar="N", help="of each conversation (default: 6)")
    add("--concurrency", type=positive, default=4, metavar="N", help="requests at a time, at most (default: 4)")
    add("--max-tokens", type=positive, default=48, metavar="N", help="of each answer, exactly (default: 48)")
    add("--system-words", type=natural, default=100, metavar="N", help="of the system prompt of all (default: 100)")
    add("--think", type=seconds, default=0.0, metavar="S", help="0 to S seconds before a next turn (default: 0)")
    add("--questions", type=Path, metavar="FILE", help="one a line, or .jsonl as in MT-Bench (default: chatd's own)")
    add("--seed", type=natural, default=0, metavar="N", help="of questions and pauses (default: 0)")
    add_outputs(parser)
    add_target(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    target = Target.of(arguments)
    from chatd.bench.conversations import Conversations, read_questions
    from chatd.bench.load import Load
    from chatd.bench.report import conversations_report

    questions = read_questions(arguments.questions)
    conversations = Conversations(
        sessions=arguments.sessions,
        turns=arguments.turns,
        max_tokens=arguments.max_tokens,
        system_words=arguments.system_words,
        think_s=arguments.think,
        seed=arguments.seed,
    )
    loads: list[tuple[ChatClient, Load]] = []

    async def work() -> None:
        expected = arguments.sessions * arguments.turns
        async with target.open() as client:
            with Load(client, "conversations", concurrency=arguments.concurrency, expected=expected) as load:
                loads.append((client, load))
                await conversations.run(load, questions)

    interrupted = run_load(work())
    if not loads:
        return 130
    client, load = loads[0]
    title = (
        f"{client.model} at {target.url or 'a server of its own'}: {arguments.sessions} sessions x {arguments.turns} "
        f"turns, {arguments.concurrency} at a time, {arguments.max_tokens} tokens an answer, "
        f"system prompt of {arguments.system_words} words"
    )
    return publish(conversations_report(title, load), arguments, interrupted)
