"""From a configuration to a running engine: the device, the model, the pool, the defaults."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from cache import PagePool, PrefixCache
from engine.api import EngineInfo, SamplingParams
from engine.attention import AttentionBackend, Choice, KVShape, build_attention
from engine.attention.base import pages_for
from engine.attention.fixed_decode import FixedDecode
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.kv_scales import Fp8
from engine.calibration import calibrate
from engine.config import EngineConfig
from engine.devices import Device, find_device, name_of, told_what_to_lower
from engine.errors import ModelError
from engine.graphs import DecodeGraphs, batches_up_to
from engine.link import link_to
from engine.local import LocalEngine
from engine.models.registry import LoadedModel, load_model
from engine.runner import ModelRunner
from engine.sampling import DeviceChooser
from engine.sizing import pool_pages, spread
from engine.speculation.loading import DraftModel, load_draft_model, load_drafter
from engine.text import Codec

log = logging.getLogger(__name__)

_TRIED_OUT = 16
"""Tokens, enough for every kernel to be compiled."""


def load_engine(config: EngineConfig) -> LocalEngine:
    """Loads the model (fetching and converting it the first time) and starts the engine. Blocks; raises ModelError."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = find_device(config.device, config.attention)
    log.info("device %s: %s", device.place, device.reason)
    with told_what_to_lower():
        return _load(config, device)


def _load(config: EngineConfig, device: Device) -> LocalEngine:
    loaded = load_model(config.model, config.models_dir, config.dtype, config.adapters, device)
    spec = loaded.model.spec
    context = config.context_length or spec.context_length
    if context > spec.context_length:
        raise ModelError(
            f"a context of {context} tokens was asked for, but the model was made for {spec.context_length}"
        )
    if loaded.assets.chat_template is None:
        log.warning("%s brings no chat template: a plain one is used", config.model)
    codec = Codec(loaded.assets)
    if codec.vocab_size > spec.vocab_size:
        raise ModelError(f"the tokenizer has {codec.vocab_size} ids, and the model knows {spec.vocab_size}")
    kv_dtype = device.kv(config.kv_dtype, loaded.weights)
    choice = device.attention(spec.head_dim, kv_dtype)
    log.info("attention %s: %s", choice.name, choice.reason)
    draft = load_draft_model(config, loaded.assets, kv_dtype, device)
    fp8 = calibrate(loaded, codec, kv_dtype, device, config.max_batched_tokens)
    chooser = device.chooser()
    setup = _Setup(config, device, loaded, draft, choice, chooser, kv_dtype, fp8, context, codec.vocab_size)
    shape = setup.pool()
    runner = setup.runner(shape)
    info = EngineInfo(
        model=config.model,
        fingerprint=codec.fingerprint,
        context_length=context,
        page_size=shape.page_size,
        num_pages=shape.num_pages,
        pool_bytes=shape.num_pages * shape.page_bytes,
        weights_dtype=loaded.weights,
        kv_dtype=name_of(kv_dtype),
        device=str(device.place),
        default_params=_default_params(codec, min(context, shape.num_pages * shape.page_size)),
        adapters=tuple(source.name for source in config.adapters),
    )
    drafter = load_drafter(config, draft, info.pool_tokens, device)
    cache = PrefixCache(PagePool(shape.num_pages, shape.page_size), config.cache_policy)
    return LocalEngine(info, codec, runner, cache, config, drafter)


@dataclass(frozen=True, slots=True)
class _Setup:
    """What a pool and a runner are made from. draft: all that it takes wants room too. fp8: for kv_dtype, where it is
    e4m3. context: in tokens. vocab_size: of the tokenizer."""

    config: EngineConfig
    device: Device
    loaded: LoadedModel
    draft: DraftModel | None
    choice: Choice
    chooser: DeviceChooser | None
    kv_dtype: torch.dtype
    fp8: Fp8 | None
    context: int
    vocab_size: int

    def pool(self) -> KVShape:
        """Sized by what there is room for beside all else."""
        config, spec = self.config, self.loaded.model.spec
        room = self.device.room(config.gpu_memory_utilization, self._trial)
        token_bytes = spec.token_bytes(self.kv_dtype)
        if self.choice.gathers(config.page_size):  # in each layer, at most what all sequences have there
            gathered = token_bytes
            if self.fp8 is not None:  # as it is stored, and then as it is attended to
                gathered += spec.token_bytes(self.fp8.attend_dtype)
            token_bytes += gathered // len(spec.layers)
        if self.draft is not None:
            token_bytes += self.draft.token_bytes
        pages = pool_pages(config.pool_tokens, room, self.context, config.page_size, token_bytes)
        return spec.kv_shape(pages, config.page_size, self.kv_dtype)

    def runner(self, shape: KVShape) -> ModelRunner:
        """Over a pool of that shape, tried out: ready for the first request."""
        longest = min(_TRIED_OUT, self.context - 1, shape.num_pages * shape.page_size - 1)
        return self._tried_out(shape, [longest] if longest > 0 else [])

    @contextmanager
    def _trial(self) -> Iterator[int]:
        """See `Device.room`: what there will be, the largest step included, over as few pages as that needs."""
        config, started = self.config, perf_counter()
        lengths = spread(config.max_batched_tokens, config.max_running, self.context - 1)
        if min(lengths) < 1:
            yield 0
            return
        log.info("trying out a step of %d tokens; kernels are compiled the first time", config.max_batched_tokens)
        pages = sum(pages_for(length + 1, config.page_size) for length in lengths)
        shape = self.loaded.model.spec.kv_shape(pages, config.page_size, self.kv_dtype)
        own = shape.num_pages * shape.page_bytes
        there: list[object] = [self._tried_out(shape, lengths)]
        if self.draft is not None:
            drafter, pool_tokens = self.draft.largest(lengths, config, self.device)
            there.append(drafter)
            own += pool_tokens * self.draft.token_bytes
        log.info("tried out in %.1f s", perf_counter() - started)
        yield own

    def _tried_out(self, shape: KVShape, lengths: Sequence[int]) -> ModelRunner:
        """With prompts of those lengths, after the graphs: before each of them torch gives back what steps had taken,
        and in a trial that has to be seen."""
        attention = self._attention(shape)
        runner = self._runner(attention, self._graphs(attention))
        if lengths:
            runner.try_out(lengths, shape.page_size)
        return runner

    def _graphs(self, attention: AttentionBackend) -> DecodeGraphs | None:
        maker = self.device.graphs()
        if maker is None or self._fixed is None or not isinstance(attention, FlashInferAttention):
            return None
        graphs = DecodeGraphs(self.loaded.model, attention, self._fixed.batches, self.device.place)
        graphs.capture(maker)
        log.info("decoding is captured for %s sequences at a time", ", ".join(map(str, self._fixed.batches)))
        return graphs

    @property
    def _fixed(self) -> FixedDecode | None:
        """Buffers for the steps that graphs are captured of; a sequence has a context of pages at most."""
        if self.choice.name != "flashinfer" or not self.loaded.model.spec.static:
            return None
        batches = batches_up_to(self.config.max_running)
        return FixedDecode(batches, batches[-1] * pages_for(self.context, self.config.page_size))

    def _attention(self, shape: KVShape) -> AttentionBackend:
        spec = self.loaded.model.spec
        place = self.device.place
        return build_attention(self.choice, shape, spec.layers, spec.num_heads, place, self._fixed, self.fp8)

    def _runner(self, attention: AttentionBackend, graphs: DecodeGraphs | None = None) -> ModelRunner:
        loaded, link = self.loaded, link_to(self.device.place)
        return ModelRunner(loaded.model, attention, loaded.adapters, self.vocab_size, link, graphs, self.chooser)


def _default_params(codec: Codec, limit: int) -> SamplingParams:
    """The model's defaults, with a length that leaves three quarters of `limit` tokens to the conversation."""
    params = codec.default_params
    return params if params.max_tokens is None else replace(params, max_tokens=min(params.max_tokens, limit // 4))
