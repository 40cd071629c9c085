"""Decoding by CUDA graphs: a step of single tokens is captured once for some numbers of rows, and then replayed, which
costs one launch in place of hundreds.

A graph reads and writes fixed addresses. So each step's tokens and positions are copied to where the captured step had
them, and attention is planned anew, into fixed buffers (`FixedDecode`). A step of fewer rows than a captured one is
filled up with rows of nobody. Attention may compute steps of so many rows in several forms, and says in which one it
has planned: each has a graph of its own.

    warm-up    for 32, 24, 16, 8, 4, 2, 1 rows, and each form:  plan -> run -> capture
    a step     plan, filled up -> tokens and positions -> replay -> logits of the rows that count

A step with a row of more than one token, or of more rows than were captured, runs as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention import AttentionBackend, AttentionRow
from engine.attention.fixed_decode import DecodeForm
from engine.models.base import Model

log = logging.getLogger(__name__)

Run = Callable[[], torch.Tensor]


class FixedAttention(AttentionBackend, Protocol):
    """A backend with fixed buffers for steps of single tokens."""

    @property
    def forms(self) -> Sequence[DecodeForm]:
        """All that there are."""
        ...

    @property
    def form(self) -> DecodeForm | None:
        """Of the planned step; None: no graph may be replayed for it."""
        ...

    def plan_form(self, form: DecodeForm) -> None:
        """Plans a step of that form whose rows are nobody's."""
        ...

    def padding(self, count: int) -> list[AttentionRow]:
        """Rows that fill up a step and write into no page of anybody."""
        ...


class Captured(Protocol):
    @property
    def output(self) -> torch.Tensor:
        """Where each replay leaves its result; another graph's replay may write there too."""
        ...

    def replay(self) -> None: ...


class GraphMaker(Protocol):
    def capture(self, run: Run) -> Captured:
        """Runs it, so that all kernels are there, and captures what it launches on the device."""
        ...


@dataclass(frozen=True, slots=True)
class _CudaGraph:
    graph: torch.cuda.CUDAGraph
    output: torch.Tensor

    def replay(self) -> None:
        self.graph.replay()


class CudaGraphs:
    """Implements `GraphMaker`. All graphs share their memory, so only one of them may be in use at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Run) -> Captured:
        aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            run()
        torch.cuda.current_stream(self._device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()
        return _CudaGraph(graph, output)


def batches_up_to(most: int) -> tuple[int, ...]:
    """Numbers of rows that are captured: 1, 2, 4, multiples of 8, and `most`."""
    return tuple(sorted({rows for rows in (1, 2, 4, *range(8, most, 8)) if rows < most} | {most}))


class DecodeGraphs:
    """The captured steps of one model over one backend. Plan, then replay, step by step; one thread."""

    def __init__(self, model: Model, attention: FixedAttention, batches: Sequence[int], device: torch.device) -> None:
        """batches: those for which `attention` has fixed buffers."""
        self._model = model
        self._attention = attention
        self._batches = tuple(sorted(batches))
        most = self._batches[-1]
        with torch.inference_mode(False):
            self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
            self._positions = torch.zeros(most, dtype=torch.int64, device=device)
            self._rows = torch.arange(most, device=device)
        self._captured: dict[DecodeForm, Captured] = {}
        self._planned: DecodeForm | None = None

    @torch.inference_mode()
    def capture(self, maker: GraphMaker) -> None:
        """All of them, the largest first: the others then find room in its memory. RuntimeError where attention has no
        buffers for one of them."""
        for form in sorted(self._attention.forms, key=lambda form: form.rows, reverse=True):
            self._attention.plan_form(form)
            if self._attention.form != form:
                raise RuntimeError(f"attention has no fixed buffers for {form.rows} rows")
            self._captured[form] = maker.capture(lambda rows=form.rows: self._forward(rows))  # type: ignore[misc]
            log.debug("decoding %s: captured", form)

    def plan(self, rows: Sequence[AttentionRow]) -> bool:
        """Plans attention for the step. True: for `replay`, filled up behind its own rows. False: to be run."""
        batch = self._batch(rows)
        self._planned = None
        if batch is not None:
            self._attention.plan([*rows, *self._attention.padding(batch - len(rows))])
            if self._attention.form in self._captured:
                self._planned = self._attention.form
                return True
        self._attention.plan(rows)
        return False

    @torch.inference_mode()
    def replay(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [batch, vocab] of the planned step, good until the next replay. tokens and positions: int64 [rows],
        without what it was filled up with. Each plan serves once: RuntimeError where there is none."""
        form, self._planned = self._planned, None
        if form is None or self._attention.form != form:
            raise RuntimeError("a graph was to be replayed for a step that was not planned")
        self._tokens[: len(tokens)].copy_(tokens)
        self._positions[: len(positions)].copy_(positions)
        self._positions[len(positions) : form.rows].zero_()
        captured = self._captured[form]
        captured.replay()
        return captured.output

    def _batch(self, rows: Sequence[AttentionRow]) -> int | None:
        if any(row.count != 1 for row in rows):
            return None
        return next((batch for batch in self._batches if batch >= len(rows)), None) if self._captured else None

    def _forward(self, batch: int) -> torch.Tensor:
        return self._model.forward(self._tokens[:batch], self._positions[:batch], self._rows[:batch], self._attention)
