"""Lines from the keyboard or from a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from chatd.terminal.interrupts import Interrupts


def read_lines(interrupts: Interrupts) -> Iterator[str]:
    """Lines with something in them, until the end of the input, Ctrl-D, or Ctrl-C at the prompt."""
    if not sys.stdin.isatty():
        yield from (line for line in map(str.strip, sys.stdin) if line)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() editing and history
    while not interrupts.leaving:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line:
            yield line
