"""Where the time of one step of the model goes, part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np
import torch

from cache import TailCopy
from chatd.failure import CommandFailed
from engine.adapters import Adapters
from engine.attention import AttentionBackend, AttentionRow, TorchAttention
from engine.config import EngineConfig
from engine.loading import kv_dtype_of
from engine.models.base import Model
from engine.models.decoder import Decoder
from engine.quant import Linear
from engine.weights import open_model

PAGE_SIZE = 16
LAYERS = ("qkv", "out", "gate_up", "down")
PARTS = (*LAYERS, "attention", "plan", "lm_head", "rest")


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
    """Milliseconds of the step whose total is the median; `parts`, by the names of PARTS, add up to it."""

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


class _TimedLayers(Adapters):
    """Stands where adapters do, around each linear layer."""

    def __init__(self, watch: _Stopwatch) -> None:
        super().__init__()
        self._watch = watch

    def adapt(self, name: str, linear: Linear, dtype: torch.dtype) -> Linear:
        part = name.rpartition(".")[2]

        def timed(x: torch.Tensor) -> torch.Tensor:
            with self._watch.measure(part):
                return linear(x)

        return timed


class _TimedAttention:
    """An attention backend around another."""

    def __init__(self, backend: AttentionBackend, watch: _Stopwatch) -> None:
        self._backend = backend
        self._watch = watch

    def plan(self, rows: Sequence[AttentionRow]) -> None:
        with self._watch.measure("plan"):
            self._backend.plan(rows)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with self._watch.measure("attention"):
            return self._backend.run(layer, q, k, v)

    def fork(self, source: int, target: int, tokens: int, tail: TailCopy | None) -> None:
        self._backend.fork(source, target, tokens, tail)

    def drop(self, sequence: int) -> None:
        self._backend.drop(sequence)


def measure_steps(config: EngineConfig, shapes: Sequence[StepShape], repeat: int) -> Iterator[StepTime]:
    """Each shape `repeat` times, on keys and values of made-up tokens.

    Raises ModelError for a model that cannot be loaded, CommandFailed for one that our decoder does not run, or for a
    shape that the model has no context for.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    watch = _Stopwatch()
    converted = open_model(config.model, config.models_dir, config.dtype)
    model = Decoder(converted.config, converted.tensors(), _TimedLayers(watch))
    kv_dtype = kv_dtype_of(config)
    for shape in shapes:
        if shape.context + shape.new > model.spec.context_length:
            raise CommandFailed(f"{shape}: the model was made for {model.spec.context_length} tokens")
        pages = -(-(shape.context + shape.new) // PAGE_SIZE)
        backend = TorchAttention(model.spec.kv_shape(shape.sequences * pages, PAGE_SIZE, kv_dtype), model.spec.layers)
        yield _measure(model, _TimedAttention(backend, watch), watch, shape, repeat)


@torch.inference_mode()
def _measure(model: Model, attention: _TimedAttention, watch: _Stopwatch, shape: StepShape, repeat: int) -> StepTime:
    for start in range(0, shape.context, 256):
        _step(model, attention, shape, start, min(256, shape.context - start), sample=False)()
    step = _step(model, attention, shape, shape.context, shape.new, sample=True)
    headless = _step(model, attention, shape, shape.context, shape.new, sample=False)
    step()
    without = median(_seconds(headless) for _ in range(repeat))
    runs = []
    for _ in range(repeat):
        watch.seconds = dict.fromkeys(PARTS, 0.0)
        total = _seconds(step)
        runs.append((total, watch.seconds))
    runs.sort(key=lambda run: run[0])
    total, parts = runs[len(runs) // 2]
    parts["lm_head"] = max(0.0, median(run[0] for run in runs) - without)
    parts["rest"] = total - sum(parts.values())
    return StepTime(str(shape), total * 1e3, runs[0][0] * 1e3, {part: parts[part] * 1e3 for part in PARTS})


def _step(
    model: Model, attention: _TimedAttention, shape: StepShape, start: int, count: int, *, sample: bool
) -> Callable[[], None]:
    """A step of the sequences of `shape`, in pages that follow one another."""
    per_sequence = -(-(shape.context + shape.new) // PAGE_SIZE)
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
