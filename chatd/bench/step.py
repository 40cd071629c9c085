"""Where the time of one step of the model goes, part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np
import torch

from chatd.failure import CommandFailed
from engine.attention import AttentionBackend, AttentionRow, CpuAttention
from engine.attention.base import pages_for
from engine.config import EngineConfig
from engine.devices import CpuDevice
from engine.models.base import Model
from engine.models.decoder import Decoder
from engine.weights import open_model

PAGE_SIZE = 16
PARTS = ("qkv", "heads", "attention", "out", "gate_up", "down", "lm_head", "rest")


@dataclass(frozen=True, slots=True)
class StepShape:
    """`sequences`, each with `context` tokens behind it, compute `new` tokens each and sample one."""

    sequences: int
    context: int
    new: int

    @classmethod
    def parse(cls, text: str) -> StepShape:
        """SEQUENCESxCONTEXTxNEW, such as 4x400x1. Raises ValueError."""
        sequences, context, new = (int(part) for part in text.split("x"))
        if sequences < 1 or context < 0 or new < 1:
            raise ValueError(f"no step: {text}")
        return cls(sequences, context, new)

    def __str__(self) -> str:
        return f"{self.sequences}x{self.context}x{self.new}"


@dataclass(frozen=True, slots=True)
class StepTime:
    """Milliseconds. parts_ms: by the names of PARTS, of a step computed part by part, which takes longer."""

    shape: str
    total_ms: float
    fastest_ms: float
    parts_ms: dict[str, float]


class _Stopwatch:
    """Seconds by part of the step that runs."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        start = perf_counter()
        yield
        self.seconds[part] += perf_counter() - start


def measure_steps(config: EngineConfig, shapes: Sequence[StepShape], repeat: int) -> Iterator[StepTime]:
    """Each shape `repeat` times, on keys and values of made-up tokens.

    Raises ModelError for a model that cannot be loaded, CommandFailed for one that our decoder does not run, or for a
    shape that the model has no context for.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    watch, converted = _Stopwatch(), open_model(config.model, config.models_dir, config.dtype)
    tensors = converted.tensors()
    model, watched = Decoder(converted.config, tensors), Decoder(converted.config, tensors, watch=watch)
    kv_dtype = CpuDevice().kv(config.kv_dtype, CpuDevice().layout(config.dtype).name)
    for shape in shapes:
        if shape.context + shape.new > model.spec.context_length:
            raise CommandFailed(f"{shape}: the model was made for {model.spec.context_length} tokens")
        pages = pages_for(shape.context + shape.new, PAGE_SIZE)
        backend = CpuAttention(model.spec.kv_shape(shape.sequences * pages, PAGE_SIZE, kv_dtype), model.spec.layers)
        yield _measure(model, watched, backend, watch, shape, repeat)


@torch.inference_mode()
def _measure(
    model: Model, watched: Model, attention: AttentionBackend, watch: _Stopwatch, shape: StepShape, repeat: int
) -> StepTime:
    for start in range(0, shape.context, 256):
        _step(model, attention, shape, start, min(256, shape.context - start), sample=False)()
    step = _step(model, attention, shape, shape.context, shape.new, sample=True)
    part_by_part = _step(watched, attention, shape, shape.context, shape.new, sample=True)
    step()
    part_by_part()
    totals, runs = [], []
    for _ in range(repeat):
        totals.append(_seconds(step))
        watch.seconds = dict.fromkeys(PARTS, 0.0)
        seconds = _seconds(part_by_part)
        parts = watch.seconds | {"rest": seconds - sum(watch.seconds.values())}
        runs.append((seconds, parts))
    parts = sorted(runs, key=lambda run: run[0])[repeat // 2][1]
    return StepTime(str(shape), median(totals) * 1e3, min(totals) * 1e3, {name: parts[name] * 1e3 for name in PARTS})


def _step(
    model: Model, attention: AttentionBackend, shape: StepShape, start: int, count: int, *, sample: bool
) -> Callable[[], None]:
    """A step of the sequences of `shape`, in pages that follow one another."""
    per_sequence = pages_for(shape.context + shape.new, PAGE_SIZE)
    pages = np.arange(shape.sequences * per_sequence, dtype=np.int32).reshape(shape.sequences, -1)
    end = shape.context + shape.new
    rows = [AttentionRow(number, pages[number], start, count, end) for number in range(shape.sequences)]
    positions = torch.arange(start, start + count).repeat(shape.sequences)
    tokens = (torch.arange(len(positions)) * 7919 + start) % model.spec.vocab_size
    last = torch.arange(1, shape.sequences + 1) * count - 1 if sample else torch.empty(0, dtype=torch.int64)

    def run() -> None:
        attention.plan(rows)
        model.forward(tokens, positions, last, attention)

    return run


def _seconds(run: Callable[[], None]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start
