"""Model files: found or fetched, checked, converted once, then mapped into memory."""

from __future__ import annotations

from pathlib import Path

from engine.config import WeightsDtype
from engine.models.config import is_compact
from engine.weights.convert import ConvertedModel, ensure_converted
from engine.weights.layout import cpu_layout
from engine.weights.source import FolderSource, parse_source

__all__ = ["ConvertedModel", "open_model", "pull"]


def open_model(model: str, models_dir: Path, dtype: WeightsDtype = "auto") -> ConvertedModel:
    """The CPU's copy of a model, fetched and converted first if it is not there. Raises ModelError."""
    return ensure_converted(parse_source(model), models_dir, cpu_layout(dtype))


def pull(model: str, models_dir: Path, dtype: WeightsDtype = "auto") -> Path:
    """Fetches and converts a model, so that a later start is quick; gives the folder of the copy. Raises ModelError.

    A folder that only transformers can run is read where it is.
    """
    source = parse_source(model)
    if isinstance(source, FolderSource) and not is_compact(source.config()):
        return source.path
    return open_model(model, models_dir, dtype).folder
