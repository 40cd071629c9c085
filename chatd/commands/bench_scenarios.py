"""chatd bench scenarios: three loads of fixed lengths, and where their time goes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from chatd.commands.arguments import factor, natural, positive
from chatd.commands.bench_load import Target, add_outputs, add_target, publish, run_load

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from chatd.bench.client import ChatClient
    from chatd.bench.scenarios import Played

HELP = "128 + 128, 2048 + 512 and 512 + 1024 tokens: times, throughput, and the shares of prefill and decode"


def add_parser(parts: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = parts.add_parser("scenarios", help=HELP, description=HELP, allow_abbrev=False)
    add = parser.add_argument
    add("--concurrency", type=positive, default=64, metavar="N", help="requests at a time, at most (default: 64)")
    add("--requests", type=positive, metavar="N", help="of each load (default: as --concurrency)")
    add("--scale", type=factor, default=1.0, metavar="F", help="multiplies all lengths (default: 1)")
    add("--seed", type=natural, default=0, metavar="N", help="of the random words of the prompts (default: 0)")
    add_outputs(parser)
    add_target(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    target = Target.of(arguments)
    from chatd.bench.report import scenarios_report
    from chatd.bench.scenarios import SCENARIOS, Player
    from chatd.bench.words import find_prompts

    requests = arguments.requests or arguments.concurrency
    player = Player(arguments.concurrency, requests, arguments.seed)
    played: list[Played] = []
    clients: list[ChatClient] = []

    async def work() -> None:
        async with target.open() as client:
            clients.append(client)
            prompts = await find_prompts(client)
            for scenario in SCENARIOS:
                await player.play(scenario.scaled(arguments.scale), client, prompts, played)

    interrupted = run_load(work())
    if not played:
        return 130
    title = (
        f"{clients[0].model} at {target.url or 'a server of its own'}: {requests} requests of each load, "
        f"{arguments.concurrency} at a time, lengths times {arguments.scale:g}"
    )
    return publish(scenarios_report(title, played), arguments, interrupted)
