"""Which class runs a model: the compact decoder where it can, else transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.adapters import Adapters, load_adapter
from engine.config import AdapterSource, WeightsDtype
from engine.devices import CpuDevice, Device
from engine.errors import ModelError
from engine.models.base import Model
from engine.models.config import is_compact
from engine.models.decoder import Decoder
from engine.native import multiplies_bfloat16
from engine.text import ChatAssets, assets_from_folder
from engine.weights.convert import choose_layout, ensure_converted
from engine.weights.source import FolderSource, parse_source


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """weights: the layout of the weights, by its name in EngineConfig.dtype. adapters: those that the model applies."""

    model: Model
    adapters: Adapters
    assets: ChatAssets
    weights: str


def load_model(
    spec: str,
    models_dir: Path,
    dtype: WeightsDtype,
    adapters: Sequence[AdapterSource] = (),
    device: Device | None = None,
) -> LoadedModel:
    """The model that `spec` names (see EngineConfig), on a device (None: the CPU), ready to run. Raises ModelError."""
    device = device or CpuDevice()
    source, layout = parse_source(spec), choose_layout(device.weights(dtype))
    if isinstance(source, FolderSource) and not is_compact(source.config()):
        if adapters:
            raise ModelError("adapters are only supported for models of the Llama family")
        from engine.models.hf import load_hf  # loads transformers, which the default model does without

        beside_packed = torch.bfloat16 if multiplies_bfloat16() else torch.float32
        dense = layout.dense if layout.bits is None else beside_packed
        model = load_hf(source.path, dense, bits=layout.bits).to(device.place)
        return LoadedModel(model, Adapters(), assets_from_folder(source.path), layout.name)
    converted = ensure_converted(source, models_dir, layout)
    loaded = Adapters((load_adapter(adapter, converted.config) for adapter in adapters), device.place)
    tensors = {name: tensor.to(device.place) for name, tensor in converted.tensors().items()}
    decoder = Decoder(converted.config, tensors, loaded, elementwise=device.elementwise(layout.dense))
    return LoadedModel(decoder, loaded, converted.assets, layout.name)
