"""Where files of a user go."""

from __future__ import annotations

import os
from pathlib import Path


def xdg_folder(variable: str, fallback: str) -> Path:
    """A folder of the XDG base directory specification, which ignores relative paths."""
    named = Path(os.environ.get(variable, ""))
    return named if named.is_absolute() else Path.home() / fallback
