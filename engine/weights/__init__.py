"""Model files: found or fetched, checked, converted once, then mapped into memory."""

from __future__ import annotations

from pathlib import Path

from engine.weights.convert import ConvertedModel, choose_layout, ensure_converted
from engine.weights.source import parse_source

__all__ = ["ConvertedModel", "open_model", "pull"]


def open_model(model: str, models_dir: Path, dtype: str = "auto") -> ConvertedModel:
    """The converted copy of a model, fetched and made first if it is not there. Raises ModelError."""
    return ensure_converted(parse_source(model), models_dir, choose_layout(dtype))


def pull(model: str, models_dir: Path, dtype: str = "auto") -> Path:
    """Fetches and converts a model, so that a later start is quick; gives the folder of the copy. Raises ModelError."""
    return open_model(model, models_dir, dtype).folder
