"""A folder of safetensors to a model of transformers, checked before it may answer anything.

Refused by name: what keeps more than keys and values of each token (Mamba, convolutions), attends in its own way
(ALiBi, sinks, chunks), has several inputs (encoder-decoder, images), or is written in remote code.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine.errors import ModelError
from engine.models.hf import interface
from engine.models.hf.check import check
from engine.models.hf.model import HfModel
from engine.models.hf.packing import pack_linears
from engine.models.hf.probe import probe
from engine.quant.grouped import Bits

log = logging.getLogger(__name__)

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def load_hf(folder: Path, dtype: torch.dtype, *, bits: Bits | None = None) -> HfModel:
    """Loads the weights in `dtype`, and packs its linear layers to so many bits if told to. Raises ModelError."""
    config = _config(folder)
    model_class = _model_class(config)
    context = _context_length(config)
    interface.register()
    module = _load(folder, config, model_class, dtype)
    model = HfModel(module, probe(module, context))
    check(module, model)
    if bits is not None:
        log.info("%s: %d linear layers packed to %d bits", folder.name, pack_linears(module, bits), bits)
        _check_packed(module, context)
    return model


def _check_packed(module: PreTrainedModel, context: int) -> None:
    """Code that does more with the weights of a layer than multiply by them fails here, not at the first request."""
    try:
        probe(module, context)
    except ModelError as error:
        raise ModelError(f"{error}: with packed weights. Set the dtype to bfloat16") from error


def _config(folder: Path) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the configuration's own code raises
        raise ModelError(f"transformers cannot use {folder / 'config.json'}: {_first_line(error)}") from error


def _model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class of a causal LM with plain keys and values. Raises ModelError for all others."""
    name = config.model_type

    def refused(why: str) -> ModelError:
        return ModelError(f"the architecture {name!r} is not supported: {why}")

    if config.is_encoder_decoder:
        raise refused("it has an encoder")
    if config.get_text_config() is not config:
        raise refused("it takes more than text")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refused("transformers has no causal language model of it")
    if getattr(config, "quantization_config", None) is not None:
        raise refused("its weights are quantized in a way that is not read")
    model_class: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if model_class._is_stateful:
        raise refused("it keeps a state besides keys and values")
    if unknown := set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES:
        raise refused(f"it has layers of the type {min(unknown)!r}")
    if not model_class._supports_attention_backend:
        raise refused("its attention cannot be replaced")
    return model_class


def _context_length(config: PretrainedConfig) -> int:
    """The longest sequence whose cached keys stay right. Raises ModelError where the configuration does not say."""
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ModelError(f"the architecture {config.model_type!r} does not say how long its context is")
    rope = getattr(config, "rope_parameters", None) or {}
    for options in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if options.get("rope_type") == "longrope":
            # Beyond this length the angles of every earlier token change, so cached keys would be wrong.
            trained = options.get("original_max_position_embeddings")
            trained = trained or getattr(config, "original_max_position_embeddings", None) or length
            if trained < length:
                log.warning("longrope: the context is %d tokens of %d, with the short factors", trained, length)
                length = int(trained)
    return length


def _load(
    folder: Path, config: PretrainedConfig, model_class: type[PreTrainedModel], dtype: torch.dtype
) -> PreTrainedModel:
    options: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": interface.NAME,
        "use_safetensors": True,
        "local_files_only": True,
        "trust_remote_code": False,
        "output_loading_info": True,
    }
    try:
        with _quiet():
            module, info = model_class.from_pretrained(folder, **options)
    except Exception as error:  # whatever the model's own code raises
        raise ModelError(f"the weights of {folder} cannot be loaded: {_first_line(error)}") from error
    for keys, what in (
        ("missing_keys", "lacks"),
        ("unexpected_keys", "has, of unknown use,"),
        ("mismatched_keys", "has, of another shape,"),
    ):
        if found := sorted(map(str, info[keys])):
            raise ModelError(f"the model {what} {len(found)} tensors, among them {found[0]}")
    module.requires_grad_(False)
    module.config.pad_token_id = None  # nothing is padded here, so its warnings about padding mislead
    loaded: PreTrainedModel = module.eval()
    return loaded


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar and no report of its own: what is wrong is raised."""
    bars, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
