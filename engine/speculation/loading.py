"""The drafter that a configuration asks for, and the draft model behind it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention.base import pages_for
from engine.attention.kv_scales import Fp8
from engine.calibration import calibrate
from engine.config import EngineConfig
from engine.devices import Device
from engine.errors import ModelError
from engine.models.registry import LoadedModel, load_model
from engine.speculation.draft_model import PAGE_SIZE, TRIED_OUT_MORE, ModelDrafter
from engine.speculation.drafter import Drafter
from engine.speculation.ngram import NgramDrafter
from engine.text import ChatAssets, Codec


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A model that guesses for another one. vocab_size: of its tokenizer. kv_dtype: of its keys and values; fp8: how
    they are kept where that is e4m3."""

    loaded: LoadedModel
    vocab_size: int
    kv_dtype: torch.dtype
    fp8: Fp8 | None

    @property
    def token_bytes(self) -> int:
        """What the keys and values of a token take."""
        return self.loaded.model.spec.token_bytes(self.kv_dtype)

    def drafter(self, config: EngineConfig, pool_tokens: int, device: Device) -> ModelDrafter:
        """With room for that many tokens."""
        return ModelDrafter(
            self.loaded.model, self.vocab_size, self.kv_dtype, config.max_batched_tokens, pool_tokens, device, self.fp8
        )

    def largest(self, lengths: Sequence[int], config: EngineConfig, device: Device) -> tuple[ModelDrafter, int]:
        """A drafter that has computed prompts of these lengths, as far as its context reaches, and the tokens that it
        has room for, which are no more than that needs."""
        longest = max(1, self.loaded.model.spec.context_length - TRIED_OUT_MORE)
        lengths = [min(length, longest) for length in lengths]
        pool_tokens = sum(pages_for(length + TRIED_OUT_MORE, PAGE_SIZE) for length in lengths) * PAGE_SIZE
        drafter = self.drafter(config, pool_tokens, device)
        drafter.try_out(lengths)
        return drafter, pool_tokens


def load_draft_model(
    config: EngineConfig, assets: ChatAssets, kv_dtype: torch.dtype, device: Device
) -> DraftModel | None:
    """None where there is none. assets: those of the model itself. kv_dtype: of keys and values. Raises ModelError.

    A draft model is on the same device and has the dtypes of the model. Its guesses are ids: each id must stand for the
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
    codec = Codec(loaded.assets)
    if codec.vocab_size > loaded.model.spec.vocab_size:
        raise ModelError(f"the tokenizer has {codec.vocab_size} ids, and the draft model knows fewer")
    fp8 = calibrate(loaded, codec, kv_dtype, device, config.max_batched_tokens)
    return DraftModel(loaded, codec.vocab_size, kv_dtype, fp8)


def load_drafter(config: EngineConfig, draft: DraftModel | None, pool_tokens: int, device: Device) -> Drafter | None:
    """None where speculation is off. draft: the draft model, where there is one, which gets room for `pool_tokens`."""
    if draft is None:
        return NgramDrafter() if device.speculation(config.speculation) == "ngram" else None
    drafter = draft.drafter(config, pool_tokens, device)
    drafter.try_out([2])  # reads the weights in
    return drafter


def _ids(assets: ChatAssets) -> dict[str, int]:
    """Token to id, added tokens included."""
    tokenizer = json.loads(assets.tokenizer_json)
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):  # unigram: pairs of a token and its score, in the order of the ids
        vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in tokenizer["added_tokens"]}}
