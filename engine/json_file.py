"""JSON files that come with models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import ModelError


def read_json_object(path: Path) -> dict[str, Any]:
    """Raises ModelError, with the path."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value
