"""chatd pull: fetches and converts the model, so that a later start is quick."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from chatd.commands.options import add_settings, settings_of
from chatd.failure import CommandFailed
from engine.errors import ModelError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

HELP = "fetch and convert the model"


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("pull", help=HELP, description=HELP, allow_abbrev=False)
    add_settings(parser, ("data_dir", "model", "models_dir", "dtype"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    settings = settings_of(arguments)
    from engine.weights import pull  # loads torch, which the other commands do without

    try:
        folder = pull(settings.model, settings.models_dir, settings.dtype)
    except ModelError as error:
        raise CommandFailed(str(error)) from error
    except OSError as error:
        raise CommandFailed(f"the model cannot be kept in {settings.models_dir}: {error.strerror}") from error
    print(f"{settings.model} is ready in {folder}")
    return 0
