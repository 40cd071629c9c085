"""What is measured on a card, each as a named measurement that tells about how long it takes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import torch

from engine.attention.kv_scales import FP8
from tests.gpu.budget import Budget
from tests.gpu.checks import BackendName
from tests.gpu.decoder import RandomDecoder
from tests.gpu.device import Device
from tests.gpu.loads import LOADS, Load, play
from tests.gpu.products import narrow_types, short
from tests.gpu.report import Row
from tests.gpu.stepper import Stepper

BATCHES = (1, 8, 64)
CONTEXTS = (128, 2048, 16384)
PROMPT = 2048
SHARED = (256, 2048)
"""Tokens that all rows begin with: about as many as are worth reading once, and more (LEAST_SAVED in cascade.py)."""

_STEPS = 20
_OWN = 128  # tokens that a row has for itself where rows share
_NARROW = "decode, weights in 8 bits"


@dataclass(frozen=True, slots=True)
class Card:
    """copy_gbs: bytes read and written by a copy, GB/s. tflops: of a bfloat16 product, random numbers."""

    copy_gbs: float
    tflops: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """seconds: about how long `run` takes on an H200."""

    table: str
    name: str
    seconds: float
    run: Callable[[], Row]


def run_all(measurements: Sequence[Measurement], budget: Budget) -> list[Row]:
    """One after the other. What fails, or does not fit into the time, is a row that says so."""
    return [_run(one, budget) for one in measurements]


def _run(one: Measurement, budget: Budget) -> Row:
    if not budget.holds(one.seconds):
        return Row(one.table, one.name, note="left out: no time left")
    try:
        return one.run()
    except Exception as error:  # the other measurements are wanted all the same
        return Row(one.table, one.name, note=f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    finally:
        gc.collect()


def measure_card(device: Device, size: int = 1 << 31, product: int = 8192, repeats: int = 10) -> Card:
    """size: bytes of the copy. product: rows and columns of the matrices."""
    source = torch.empty(size, dtype=torch.uint8, device=device.torch).random_()
    target = torch.empty_like(source)
    copy = device.milliseconds(lambda: target.copy_(source), repeats)
    left, right = (torch.randn((product, product), device=device.torch).to(torch.bfloat16) for _ in range(2))
    multiply = device.milliseconds(lambda: left @ right, repeats)
    return Card(2 * size / copy / 1e6, 2 * product**3 / multiply / 1e9)


def all_measurements(
    device: Device,
    card: Card,
    model: RandomDecoder,
    backends: Sequence[BackendName],
    shares: bool,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    prompt: int = PROMPT,
    loads: Sequence[Load] = LOADS,
    shared: Sequence[int] = SHARED,
) -> Iterator[Measurement]:
    """The most wanted first. shares: shared pages can be read once. shared: how many tokens then are."""
    best = backends[0]
    for batch in batches:
        for context in contexts:
            name = f"{batch} x {context:,}"
            yield Measurement("decode", name, 5, partial(decode, device, card, model, best, batch, context))
    for backend in backends:
        run = partial(prefill, device, card, model, backend, prompt)
        yield Measurement("prefill", f"{prompt:,} tokens, {backend}", 3, run)
    for load in loads:
        yield Measurement("loads", load.name, load.seconds, partial(play, device, model, best, load))
    for tokens in shared if shares and best == "flashinfer" else ():
        for once in (True, False):
            name = f"{batches[-1]} x {tokens + _OWN:,}, {tokens:,} shared, read {'once' if once else 'by each'}"
            run = partial(decode_shared, device, model, name, batches[-1], tokens, once)
            yield Measurement("decode, shared tokens", name, 5, run)
    middle = contexts[len(contexts) // 2]
    for narrow in narrow_types(device):
        for batch in dict.fromkeys((batches[0], batches[-1])):
            name = f"{batch} x {middle:,}, {short(narrow)}"
            run = partial(narrow_decode, device, card, model, best, batch, middle, narrow)
            yield Measurement(_NARROW, name, 6, run)
        name = f"{prompt:,} tokens, {best}, {short(narrow)} weights"
        yield Measurement("prefill", name, 4, partial(narrow_prefill, device, card, model, best, prompt, narrow))
    for batch in batches:
        for backend in backends:
            name = f"{batch} x {middle:,}, {backend}, no graph"
            yield Measurement("backends", name, 6, partial(eager, device, model, backend, batch, middle))
    for context in contexts:
        run = partial(decode, device, card, model, best, batches[-1], context, FP8)
        yield Measurement("decode, keys and values in 8 bits", f"{batches[-1]} x {context:,}", 5, run)


def decode(
    device: Device,
    card: Card,
    model: RandomDecoder,
    backend: BackendName,
    batch: int,
    context: int,
    kv: torch.dtype | None = None,
) -> Row:
    """Steps as served, each planned and launched while the one before runs, beside the kernels alone (a graph), steps
    one after the other, and steps without a graph."""
    stepper = Stepper(device, model, backend, batch, context + 3 * _STEPS, kv)
    replay = stepper.capture_decode(context) if backend == "flashinfer" else stepper.decode
    kernels = device.milliseconds(replay, _STEPS)
    step = steps(stepper, replay, context, ahead=1)
    waiting = steps(stepper, replay, context)
    without = steps(stepper, stepper.decode, context, ahead=1)
    element = model.dtype.itemsize if kv is None else kv.itemsize
    read = model.shape.decode_bytes(batch, context, element, model.weight_bytes)
    figures = {
        "ms": step,
        "GB/s": read / step / 1e6,
        "of copy": read / step / 1e6 / card.copy_gbs,
        "kernels, ms": kernels,
        "outside": outside(step, kernels),
        "one by one, ms": waiting,
        "no graph, ms": without,
        "tokens/s": batch / step * 1e3,
    }
    table = "decode" if kv is None else "decode, keys and values in 8 bits"
    return Row(table, f"{batch} x {context:,}", figures, stepper.shared)


def narrow_decode(
    device: Device,
    card: Card,
    model: RandomDecoder,
    backend: BackendName,
    batch: int,
    context: int,
    narrow: torch.dtype,
) -> Row:
    """As `decode`, by a model with weights of 8 bits that is made for it. Bytes read are those of such weights."""
    row = decode(device, card, model.narrowed(narrow, device.free_bytes()), backend, batch, context)
    return replace(row, table=_NARROW, name=f"{row.name}, {short(narrow)}")


def narrow_prefill(
    device: Device, card: Card, model: RandomDecoder, backend: BackendName, prompt: int, narrow: torch.dtype
) -> Row:
    row = prefill(device, card, model.narrowed(narrow, device.free_bytes()), backend, prompt)
    return replace(row, name=f"{row.name}, {short(narrow)} weights")


def decode_shared(device: Device, model: RandomDecoder, name: str, batch: int, shared: int, once: bool) -> Row:
    """Rows that begin with the same tokens, whose pages are read once for all rows, or by each row."""
    context = shared + _OWN
    stepper = Stepper(
        device, model, "flashinfer", batch, context + 3 * _STEPS, shared=shared, least_saved=1 if once else None
    )
    replay = stepper.capture_decode(context)
    kernels = device.milliseconds(replay, _STEPS)
    step = steps(stepper, replay, context, ahead=1)
    figures = {"ms": step, "kernels, ms": kernels, "outside": outside(step, kernels), "tokens/s": batch / step * 1e3}
    return Row("decode, shared tokens", name, figures, stepper.shared)


def steps(stepper: Stepper, work: Callable[[], object], context: int, ahead: int = 0) -> float:
    """ms of a step: planned, run, and its tokens read. ahead: how many steps are launched before that."""
    for warm_up in (True, False):
        stepper.begin_decode(context)
        started = perf_counter()
        stepper.decode_ahead(work, range(context, context + (3 if warm_up else _STEPS)), ahead)
    return 1e3 * (perf_counter() - started) / _STEPS


def outside(step: float, kernels: float) -> float:
    """The share of a step in which no kernel runs."""
    return max(0.0, 1 - kernels / step)


def prefill(device: Device, card: Card, model: RandomDecoder, backend: BackendName, prompt: int) -> Row:
    stepper = Stepper(device, model, backend, 1, prompt)
    run = stepper.prefill([(0, 0, prompt)])
    taken = device.milliseconds(run, 5, warm_up=2)
    tflops = model.shape.prefill_flops([prompt]) / taken / 1e9
    figures = {
        "ms": taken,
        "TFLOP/s": tflops,
        "of product": tflops / card.tflops,
        "tokens/s": prompt / taken * 1e3,
    }
    return Row("prefill", f"{prompt:,} tokens, {backend}", figures, stepper.shared)


def eager(device: Device, model: RandomDecoder, backend: BackendName, batch: int, context: int) -> Row:
    stepper = Stepper(device, model, backend, batch, context + 3 * _STEPS)
    step = steps(stepper, stepper.decode, context)
    figures = {"ms": step, "tokens/s": batch / step * 1e3}
    return Row("backends", f"{batch} x {context:,}, {backend}, no graph", figures, stepper.shared)
