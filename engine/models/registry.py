"""Which class runs a model: the compact decoder where it can, else transformers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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
from engine.weights.convert import ensure_converted
from engine.weights.layout import Layout
from engine.weights.source import FolderSource, parse_source

log = logging.getLogger(__name__)


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
    source, layout = parse_source(spec), device.layout(dtype)
    if isinstance(source, FolderSource) and not is_compact(source.config()):
        if adapters:
            raise ModelError("adapters are only supported for models of the Llama family")
        if layout.rowwise is not None:
            raise ModelError(
                f"{layout.name} weights on CUDA are only supported for models of the Llama family: "
                "choose bfloat16, float16 or float32"
            )
        from engine.models.hf import load_hf  # loads transformers, which the default model does without

        beside_packed = torch.bfloat16 if multiplies_bfloat16() else torch.float32
        dense = layout.dense if layout.bits is None else beside_packed
        model = load_hf(source.path, dense, bits=layout.bits).to(device.place)
        return LoadedModel(model, Adapters(), assets_from_folder(source.path), layout.name)
    converted = ensure_converted(source, models_dir, layout)
    loaded = Adapters((load_adapter(adapter, converted.config) for adapter in adapters), device.place)
    tensors = {name: tensor.to(device.place) for name, tensor in converted.tensors().items()}
    if layout.rowwise is not None:
        _tell_what_is_dense(tensors, layout)
    decoder = Decoder(converted.config, tensors, loaded, elementwise=device.elementwise(layout.dense))
    return LoadedModel(decoder, loaded, converted.assets, layout.name)


def _tell_what_is_dense(tensors: Mapping[str, torch.Tensor], layout: Layout) -> None:
    """Of the linear layers of a layout in which they have scales."""
    layers = [
        name.removesuffix(".weight") for name in tensors if name.startswith("layers.") and name.endswith(".weight")
    ]
    if dense := [name for name in layers if f"{name}.scale" not in tensors]:
        log.warning(
            "%d of %d linear layers stay dense, since %s products want multiples of 16 inputs and outputs: %s ...",
            len(dense),
            len(layers),
            layout.name,
            dense[0],
        )
