"""The drafter that a configuration asks for."""

from __future__ import annotations

import json

import numpy as np
import torch

from engine.calibration import calibrate
from engine.config import EngineConfig
from engine.devices import Device
from engine.errors import ModelError
from engine.models.registry import LoadedModel, load_model
from engine.speculation.draft_model import ModelDrafter
from engine.speculation.drafter import Ask, Drafter
from engine.speculation.ngram import NgramDrafter
from engine.text import ChatAssets, Codec


def load_draft_model(config: EngineConfig, assets: ChatAssets, device: Device) -> LoadedModel | None:
    """None where there is none. assets: those of the model itself. Raises ModelError.

    A draft model is on the same device and has the dtype of the model. Its guesses are ids: each id must stand for the
    same token in both.
    """
    if config.draft_model is None:
        return None
    loaded = load_model(config.draft_model, config.models_dir, config.dtype, device=device)
    if loaded.assets.tokenizer_json != assets.tokenizer_json and _ids(loaded.assets) != _ids(assets):
        raise ModelError(
            f"the draft model {config.draft_model} has another vocabulary than {config.model}: "
            "choose one that was made with the same tokenizer"
        )
    return loaded


def load_drafter(
    config: EngineConfig, draft: LoadedModel | None, kv_dtype: torch.dtype, pool_tokens: int, device: Device
) -> Drafter | None:
    """None where speculation is off. draft: the draft model, where there is one; it has kv_dtype for keys and values,
    and room for `pool_tokens` of them. Raises ModelError."""
    if draft is None:
        return NgramDrafter() if device.speculation(config.speculation) == "ngram" else None
    codec = Codec(draft.assets)
    vocab_size = codec.vocab_size
    if vocab_size > draft.model.spec.vocab_size:
        raise ModelError(f"the tokenizer has {vocab_size} ids, and the draft model knows fewer")
    fp8 = calibrate(draft, codec, kv_dtype, device, config.max_batched_tokens)
    drafter = ModelDrafter(draft.model, vocab_size, kv_dtype, config.max_batched_tokens, pool_tokens, device, fp8)
    drafter.propose([Ask(-1, np.zeros(2, dtype=np.int32), at_most=1, capacity=4)])  # reads the weights in
    drafter.drop(-1)
    return drafter


def _ids(assets: ChatAssets) -> dict[str, int]:
    """Token to id, added tokens included."""
    tokenizer = json.loads(assets.tokenizer_json)
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):  # unigram: pairs of a token and its score, in the order of the ids
        vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in tokenizer["added_tokens"]}}
