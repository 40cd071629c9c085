"""A command that cannot do its job."""

from __future__ import annotations


class CommandFailed(Exception):
    """Ends a command with exit status 1; the message is the one line that is shown, without a traceback."""
