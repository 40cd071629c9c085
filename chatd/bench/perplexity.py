"""Perplexity of a model on a text, computed by the engine's own model code and attention, in any of its layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp
from pathlib import Path
from pydoc_data.topics import topics
from time import perf_counter

import numpy as np
import torch
import torch.nn.functional as F

from cache import TokenIds
from chatd.failure import CommandFailed
from engine.attention import AttentionRow, CpuAttention, KVShape
from engine.attention.base import pages_for
from engine.config import EngineConfig, KVDtype, WeightsDtype
from engine.models.base import Model
from engine.models.registry import load_model
from engine.text import Codec

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens start .. stop - 1 are computed, from nothing; those from `scored` on are predicted and count."""

    start: int
    scored: int
    stop: int


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean of -log p(token | tokens before it in its window), over `scored` tokens.

    weights and kv: types. rows: tokens in a step. tokens_per_second: computed ones, of which windows have more.
    """

    weights: str
    kv: str
    rows: int
    scored: int
    perplexity: float
    tokens_per_second: float


def read_text(path: Path | None) -> str:
    """The file, or the language reference that every Python brings with it. Raises CommandFailed."""
    if path is None:
        return "\n\n".join(topics[name] for name in sorted(topics))
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CommandFailed(f"{path} is no text in UTF-8") from error


def windows(tokens: int, length: int) -> Iterator[Window]:
    """Covers all tokens but the first, each once; after the first window, a token has at least half a window before it.

    0 ........ length               scored: 1 .. length - 1
        half ........ half + length         length .. half + length - 1
    """
    start, scored = 0, 1
    while scored < tokens:
        stop = min(start + length, tokens)
        yield Window(start, scored, stop)
        start, scored = start + max(1, length // 2), stop


def compare(
    config: EngineConfig,
    text: str,
    *,
    weights: Sequence[WeightsDtype],
    kv: Sequence[KVDtype],
    rows: Sequence[int],
    window: int,
    limit: int,
) -> Iterator[Perplexity]:
    """Each combination in turn, on the first `limit` tokens of the text. config: which model, and the threads.

    Raises ModelError for a model that cannot be loaded, CommandFailed for too short a text or too long a window.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    for dtype in weights:
        loaded = load_model(config.model, config.models_dir, dtype)
        tokens = Codec(loaded.assets).encode(text)[:limit]
        context = loaded.model.spec.context_length
        if not 2 <= window <= context:
            raise CommandFailed(f"a window has at least 2 tokens, and at most the {context} that the model knows")
        if len(tokens) < 2:
            raise CommandFailed("the text is too short: a token is predicted from those before it")
        for kv_dtype, step in product(kv, rows):
            start = perf_counter()
            shape = loaded.model.spec.kv_shape(pages_for(window, PAGE_SIZE), PAGE_SIZE, getattr(torch, kv_dtype))
            loss, scored, computed = _loss(loaded.model, shape, tokens, window, step)
            speed = computed / (perf_counter() - start)
            yield Perplexity(dtype, kv_dtype, step, scored, exp(loss / scored), speed)


@torch.inference_mode()
def _loss(model: Model, shape: KVShape, tokens: TokenIds, window: int, rows: int) -> tuple[float, int, int]:
    """The sum of -log p, how many tokens are in it, and how many were computed.

    Windows go through the model in steps of `rows` tokens, as a chunked prompt does; how many decides which layout of
    packed weights is read (engine.quant).
    """
    attention, pages = CpuAttention(shape, model.spec.layers), np.arange(shape.num_pages, dtype=np.int32)
    ids = torch.from_numpy(tokens.astype(np.int64))
    loss, scored, computed = 0.0, 0, 0
    for part in windows(len(tokens), window):
        length = part.stop - part.start - 1  # the last token predicts nothing
        for start in range(0, length, rows):
            span = torch.arange(start, min(start + rows, length))
            following = span + part.start + 1
            wanted = torch.nonzero(following >= part.scored)[:, 0]
            attention.plan([AttentionRow(0, pages, start, len(span), length)])
            logits = model.forward(ids[part.start + span], span, wanted, attention)
            loss += float(F.cross_entropy(logits, ids[following[wanted]], reduction="sum"))
            scored += len(wanted)
        attention.drop(0)
        computed += length
    return loss, scored, computed
