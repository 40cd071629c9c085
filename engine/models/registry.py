"""Which class runs a model: the compact decoder where it can, else transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.models.base import Model
from engine.models.config import is_compact
from engine.models.decoder import Decoder
from engine.text import ChatAssets, assets_from_folder
from engine.weights.convert import choose_layout, ensure_converted
from engine.weights.source import FolderSource, parse_source


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """weights: the layout of the weights, by its name in EngineConfig.dtype."""

    model: Model
    assets: ChatAssets
    weights: str


def load_model(spec: str, models_dir: Path, dtype: str) -> LoadedModel:
    """The model that `spec` names (see EngineConfig), ready to run. Raises ModelError."""
    source, layout = parse_source(spec), choose_layout(dtype)
    weights = "int4" if layout.packed else dtype
    if isinstance(source, FolderSource) and not is_compact(source.config()):
        from engine.models.hf import load_hf  # loads transformers, which the default model does without

        assets = assets_from_folder(source.path)
        return LoadedModel(load_hf(source.path, layout.dense, packed=layout.packed), assets, weights)
    converted = ensure_converted(source, models_dir, layout)
    return LoadedModel(Decoder(converted.config, converted.tensors()), converted.assets, weights)
