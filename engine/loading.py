"""From a configuration to a running engine: the model, the pool, the defaults."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import torch

from cache import PagePool, PrefixCache
from engine.api import EngineInfo, SamplingParams
from engine.attention import CpuAttention, KVShape
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.local import LocalEngine
from engine.models.base import ModelSpec
from engine.models.registry import load_model
from engine.runner import ModelRunner
from engine.speculation.loading import load_drafter
from engine.text import Codec

log = logging.getLogger(__name__)


def load_engine(config: EngineConfig) -> LocalEngine:
    """Loads the model (fetching and converting it the first time) and starts the engine. Blocks; raises ModelError."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    loaded = load_model(config.model, config.models_dir, config.dtype, config.adapters)
    spec = loaded.model.spec
    context = config.context_length or spec.context_length
    if context > spec.context_length:
        raise ModelError(
            f"a context of {context} tokens was asked for, but the model was made for {spec.context_length}"
        )
    if loaded.assets.chat_template is None:
        log.warning("%s brings no chat template: a plain one is used", config.model)
    kv_dtype = kv_dtype_of(config)
    shape = _kv_shape(config, spec, kv_dtype, context)
    codec = Codec(loaded.assets)
    if codec.vocab_size > spec.vocab_size:
        raise ModelError(f"the tokenizer has {codec.vocab_size} ids, and the model knows {spec.vocab_size}")
    cache = PrefixCache(PagePool(shape.num_pages, shape.page_size), config.cache_policy)
    info = EngineInfo(
        model=config.model,
        fingerprint=codec.fingerprint,
        context_length=context,
        page_size=shape.page_size,
        num_pages=shape.num_pages,
        pool_bytes=shape.num_pages * shape.page_bytes,
        weights_dtype=loaded.weights,
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        device="cpu",
        default_params=_default_params(codec, min(context, shape.num_pages * shape.page_size)),
        adapters=tuple(source.name for source in config.adapters),
    )
    runner = ModelRunner(loaded.model, CpuAttention(shape, spec.layers), loaded.adapters, codec.vocab_size)
    runner.warm_up(info.num_pages, info.page_size)
    drafter = load_drafter(config, loaded.assets, kv_dtype, info.pool_tokens)
    return LocalEngine(info, codec, runner, cache, config, drafter)


def _default_params(codec: Codec, limit: int) -> SamplingParams:
    """The model's defaults, with a length that leaves three quarters of `limit` tokens to the conversation."""
    params = codec.default_params
    return params if params.max_tokens is None else replace(params, max_tokens=min(params.max_tokens, limit // 4))


def kv_dtype_of(config: EngineConfig) -> torch.dtype:
    """What `kv_dtype` says; auto: float32 beside float32 weights, else bfloat16."""
    if config.kv_dtype == "auto":
        return torch.float32 if config.dtype == "float32" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, config.kv_dtype)
    return dtype


def _kv_shape(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, context: int) -> KVShape:
    """The pool: what was asked for, or 8 contexts within a quarter of the memory."""
    token_bytes = spec.kv_shape(num_pages=1, page_size=1, dtype=dtype).page_bytes
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    tokens = config.pool_tokens or min(8 * context, memory // 4 // token_bytes)
    if tokens * token_bytes > memory:
        needed, there = tokens * token_bytes / 2**30, memory / 2**30
        raise ModelError(
            f"a pool of {tokens} tokens takes {needed:.1f} GiB, and this machine has {there:.1f}: lower it"
        )
    num_pages = tokens // config.page_size
    if num_pages < 1:
        raise ModelError(f"a pool of {tokens} tokens holds no page of {config.page_size} tokens")
    return spec.kv_shape(num_pages, config.page_size, dtype)
