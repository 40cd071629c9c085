"""chatd bench step: where the time of one step of the model goes."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from chatd.commands.arguments import positive
from chatd.commands.options import add_settings, settings_of
from chatd.failure import CommandFailed
from engine.errors import ModelError
from engine.openmp import spin_briefly

if TYPE_CHECKING:
    from argparse import _SubParsersAction

HELP = "where the time of one step of the model goes"
_SHAPES = ["1x300x1", "1x1000x1", "4x400x1", "16x400x1", "1x600x64", "1x0x512"]


def add_parser(parts: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = parts.add_parser("step", help=HELP, description=HELP.capitalize(), allow_abbrev=False)
    add = parser.add_argument
    add(
        "shapes",
        nargs="*",
        default=_SHAPES,
        metavar="SEQUENCESxCONTEXTxNEW",
        help="so many sequences, tokens behind each, and new tokens of each: NEW 1 is a decode step, more a chunk of a "
        f"prompt (default: {' '.join(_SHAPES)})",
    )
    add("--repeat", type=positive, default=30, metavar="N", help="how often, of which the median counts (default: 30)")
    add("--json", action="store_true", help="print a JSON array instead of a table")
    add_settings(parser, ["model", "models_dir", "threads", "dtype", "kv_dtype"])
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    settings = settings_of(arguments)
    spin_briefly()
    from chatd.bench.step import StepShape, measure_steps  # loads torch

    try:
        shapes = [StepShape.parse(text) for text in arguments.shapes]
    except ValueError:
        raise CommandFailed("a step is SEQUENCESxCONTEXTxNEW, such as 4x400x1") from None
    try:
        times = list(measure_steps(settings.engine_config(), shapes, arguments.repeat))
    except ModelError as error:
        raise CommandFailed(str(error)) from error
    if arguments.json:
        print(json.dumps([asdict(time) for time in times], indent=2))
        return 0
    from chatd.bench.report import table

    head = ("step, ms", "median", "fastest", *times[0].parts_ms)
    lines = []
    for time in times:
        figures = (time.total_ms, time.fastest_ms, *time.parts_ms.values())
        lines.append((time.shape, *(f"{figure:.1f}" for figure in figures)))
    print(table(head, lines))
    return 0
