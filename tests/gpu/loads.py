"""The three loads of the literature (short questions, long documents, code), 64 at a time, in a fixed schedule.

All prompts are there at the start. They are computed first, in steps of at most `STEP_TOKENS` tokens; then every row
gets a token in each step until all have what they want. There is no scheduler, no prefix cache and no server in this:
it is what the model and the attention can do at most.

TTFT: from the start to the end of the step that gives a row's first token. TPOT: (end - first token) / (tokens - 1).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from tests.gpu.checks import BackendName
from tests.gpu.decoder import RandomDecoder
from tests.gpu.device import Device
from tests.gpu.report import Row
from tests.gpu.stepper import Stepper

STEP_TOKENS = 8192

Spans = list[tuple[int, int, int]]
"""row, first token, number of tokens."""


@dataclass(frozen=True, slots=True)
class Load:
    """prompt, answer: tokens of each request. seconds: about how long it takes on an H200."""

    name: str
    prompt: int
    answer: int
    seconds: float
    rows: int = 64


LOADS = (
    Load("short questions, 128 / 128", 128, 128, 6),
    Load("long documents, 2,048 / 512", 2048, 512, 20),
    Load("code, 512 / 1,024", 512, 1024, 20),
)


def schedule(prompts: Sequence[int], step_tokens: int) -> list[Spans]:
    """Steps that compute all prompts in their order, each step full but for the last."""
    steps: list[Spans] = []
    room = 0
    for row, prompt in enumerate(prompts):
        start = 0
        while start < prompt:
            if room == 0:
                steps.append([])
                room = step_tokens
            count = min(room, prompt - start)
            steps[-1].append((row, start, count))
            start, room = start + count, room - count
    return steps


def first_tokens(prompts: Sequence[int], steps: Sequence[Spans], ends: Sequence[float]) -> list[float]:
    """When each row has its first token, in the unit of `ends`, those of the steps."""
    firsts = [0.0] * len(prompts)
    for spans, end in zip(steps, ends, strict=True):
        for row, start, count in spans:
            if start + count == prompts[row]:
                firsts[row] = end
    return firsts


def summary(load: Load, firsts: Sequence[float], prefilled: float, end: float) -> dict[str, float]:
    """firsts: of each row. prefilled: when all had theirs. All in seconds from the start."""
    later = load.answer - 1
    return {
        "TTFT p50, ms": 1e3 * statistics.median(firsts),
        "TTFT max, ms": 1e3 * max(firsts),
        "TPOT p50, ms": 1e3 * statistics.median((end - first) / later for first in firsts),
        "step, ms": 1e3 * (end - prefilled) / later,
        "tokens/s": load.rows * load.answer / end,
        "prefill": prefilled / end,
        "decode": 1 - prefilled / end,
    }


def play(device: Device, model: RandomDecoder, backend: BackendName, load: Load) -> Row:
    stepper = Stepper(device, model, backend, load.rows, load.prompt + load.answer)
    prompts = [load.prompt] * load.rows
    steps = schedule(prompts, STEP_TOKENS)
    run = stepper.capture_decode(load.prompt + 1) if backend == "flashinfer" else stepper.decode
    stepper.prefill(steps[0])()  # nothing is done for the first time below
    device.synchronize()
    started, ends = perf_counter(), []
    for spans in steps:
        stepper.prefill(spans)().tolist()
        ends.append(perf_counter() - started)
    stepper.begin_decode(load.prompt + 1)
    stepper.decode_ahead(run, range(load.prompt + 1, load.prompt + load.answer), ahead=1)
    end = perf_counter() - started
    figures = summary(load, first_tokens(prompts, steps, ends), ends[-1], end)
    return Row("loads", load.name, figures, stepper.shared)
