"""chatd bench turns: the TTFT of a turn against the length of its history, with the prefix cache and without."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from chatd.commands.arguments import natural, new_file, positive
from chatd.commands.bench_load import ENGINE_SETTINGS, Target, add_outputs, publish, run_load
from chatd.commands.options import add_settings, flags_of, settings_of
from chatd.failure import CommandFailed

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from chatd.bench.load import Row

HELP = "the TTFT of a turn against the length of its history, on a server with the prefix cache and on one without"
_SETTINGS = tuple(name for name in ENGINE_SETTINGS if name != "prefix_cache")
_LENGTHS = [250, 500, 1000, 2000, 4000]


def add_parser(parts: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = parts.add_parser("turns", help=HELP, description=HELP, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--history",
        nargs="+",
        type=positive,
        default=_LENGTHS,
        metavar="N",
        help="tokens before the measured turn (default: 250 500 1000 2000 4000)",
    )
    add("--new", type=positive, default=30, metavar="N", help="words of its message, one token each (default: 30)")
    add("--repeat", type=positive, default=3, metavar="N", help="conversations of each length (default: 3)")
    add("--seed", type=natural, default=0, metavar="N", help="of the random words (default: 0)")
    add("--plot", type=new_file, metavar="FILE", help="draw the curves as a PNG; needs chatd[bench]")
    add_outputs(parser)
    add_settings(parser, _SETTINGS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    settings = settings_of(arguments)
    from chatd.bench.histories import Curve, Histories
    from chatd.bench.load import Load, answers_of
    from chatd.bench.plot import draw, require_matplotlib
    from chatd.bench.report import histories_report
    from chatd.bench.words import find_prompts

    if arguments.plot is not None:
        require_matplotlib()
    lengths = sorted(set(arguments.history))
    histories = Histories(lengths, arguments.new, arguments.repeat, arguments.seed)
    rows: list[list[Row]] = []

    async def work() -> None:
        for prefix_cache, flag in ((True, "--prefix-cache"), (False, "--no-prefix-cache")):
            target = Target(None, flags=[*flags_of(settings, _SETTINGS), flag])
            async with target.open() as client:
                prompts = await find_prompts(client)
                with Load(client, flag.strip("-"), concurrency=1, expected=histories.requests) as load:
                    rows.append(load.rows)
                    await histories.run(load, prompts, prefix_cache)

    interrupted = run_load(work())
    if not rows:
        return 130
    curve = Curve.of(lengths, [row for each in rows for row in each])
    title = f"{settings.model_name}: turns of {arguments.new} words behind a history, {arguments.repeat} of each length"
    status = publish(histories_report(title, curve), arguments, interrupted)
    if arguments.plot is not None and answers_of(curve.rows):
        try:
            draw(curve, title, arguments.plot)
        except OSError as error:
            raise CommandFailed(f"{arguments.plot} cannot be written: {error.strerror}") from error
    return status
