"""Decoding by CUDA graphs: a step of single tokens is captured once for some numbers of rows, and then replayed, which
costs one launch in place of hundreds.

A graph reads and writes fixed addresses. So each step's tokens and positions are copied to where the captured step had
them, and attention is planned anew, into fixed buffers (`FixedDecode`). A step of fewer rows than a captured one is
filled up with rows of nobody:

    warm-up    for 32, 24, 16, 8, 4, 2, 1 rows:  plan -> run -> capture
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
from engine.models.base import Model

log = logging.getLogger(__name__)

Run = Callable[[], torch.Tensor]


class FixedAttention(AttentionBackend, Protocol):
    """A backend with fixed buffers for steps of single tokens."""

    @property
    def fixed_rows(self) -> int | None:
        """The number of rows whose buffers the planned step uses; None: no graph may be replayed for it."""
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
        self._captured: dict[int, Captured] = {}
        self._planned: int | None = None

    @torch.inference_mode()
    def capture(self, maker: GraphMaker) -> None:
        """All of them, the largest first: the others then find room in its memory. RuntimeError where attention has no
        buffers for one of them."""
        for batch in reversed(self._batches):
            self._attention.plan(self._attention.padding(batch))
            if self._attention.fixed_rows != batch:
                raise RuntimeError(f"attention has no fixed buffers for {batch} rows")
            self._captured[batch] = maker.capture(lambda batch=batch: self._forward(batch))  # type: ignore[misc]
            log.debug("decoding %d sequences at a time: captured", batch)

    def plan(self, rows: Sequence[AttentionRow]) -> bool:
        """Plans attention for the step. True: for `replay`, filled up behind its own rows. False: to be run."""
        batch = self._batch(rows)
        self._planned = None
        if batch is not None:
            self._attention.plan([*rows, *self._attention.padding(batch - len(rows))])
            if self._attention.fixed_rows == batch:
                self._planned = batch
                return True
        self._attention.plan(rows)
        return False

    @torch.inference_mode()
    def replay(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [batch, vocab] of the planned step, good until the next replay. tokens and positions: int64 [rows],
        without what it was filled up with. Each plan serves once: RuntimeError where there is none."""
        batch, self._planned = self._planned, None
        if batch is None or self._attention.fixed_rows != batch:
            raise RuntimeError("a graph was to be replayed for a step that was not planned")
        self._tokens[: len(tokens)].copy_(tokens)
        self._positions[: len(positions)].copy_(positions)
        self._positions[len(positions) : batch].zero_()
        captured = self._captured[batch]
        captured.replay()
        return captured.output

    def _batch(self, rows: Sequence[AttentionRow]) -> int | None:
        if any(row.count != 1 for row in rows):
            return None
        return next((batch for batch in self._batches if batch >= len(rows) and batch in self._captured), None)

    def _forward(self, batch: int) -> torch.Tensor:
        return self._model.forward(self._tokens[:batch], self._positions[:batch], self._rows[:batch], self._attention)
