"""A step's plan to logits: flat tokens, positions and page tables, one forward pass."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch

from engine.adapters import Adapters
from engine.attention import AttentionBackend, AttentionRow
from engine.attention.base import pages_for
from engine.graphs import DecodeGraphs
from engine.link import HostLink, Link
from engine.models.base import Model
from engine.scheduler import StepRow
from engine.sequence import Sequence


class ModelRunner:
    """Runs steps on a model, its adapters and an attention backend. One thread.

    vocab_size: of the tokenizer. A model may have more rows, by which its vocabulary was padded: they have no text.
    link: to the model's device. graphs: captured steps over the same model and attention.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        adapters: Adapters,
        vocab_size: int,
        link: Link | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._adapters = adapters
        self._vocab_size = vocab_size
        self._link = link or HostLink()
        self._graphs = graphs

    @torch.inference_mode()
    def run(self, rows: list[StepRow]) -> torch.Tensor:
        """Logits [S, vocab_size] float32 of the last `sampled` tokens of each row, in order, in host memory that the
        next step writes over."""
        tokens: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        for row in rows:
            tokens += row.sequence.tokens[row.start : row.start + row.known].tolist()
            tokens += row.drafts
            positions += range(row.start, row.start + row.count)
            logit_rows += range(len(tokens) - row.sampled, len(tokens))
        self._adapters.plan((row.sequence.request.adapter, row.count) for row in rows)
        logits = self._step([_attention_row(row) for row in rows], tokens, positions, logit_rows)
        return logits if logits.shape[1] == self._vocab_size else logits[:, : self._vocab_size]

    @torch.inference_mode()
    def try_out(self, lengths: Rows[int], page_size: int) -> None:
        """Computes prompts of these lengths side by side, and then a token more of each, all of token 0, so that the
        first request waits for no weights to be read in and no kernels to be compiled.

        Uses the first pages of the pool, which the lengths plus one must fit into: call it before anybody else does.
        """
        self._adapters.plan(())
        ends = np.cumsum([pages_for(length + 1, page_size) for length in lengths])
        tables = np.split(np.arange(ends[-1], dtype=np.int32), ends[:-1])
        for starts, counts in (([0] * len(lengths), lengths), (lengths, [1] * len(lengths))):
            rows = [
                AttentionRow(number, pages, start, count, start + count)
                for number, (pages, start, count) in enumerate(zip(tables, starts, counts, strict=True))
            ]
            positions = [position for row in rows for position in range(row.start, row.start + row.count)]
            last = (np.cumsum(counts) - 1).tolist()
            self._step(rows, [0] * len(positions), positions, last)
        for number in range(len(lengths)):
            self._attention.drop(number)

    @torch.inference_mode()
    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child's lease is a fork of the parent's; from now on it has the same keys and values."""
        tail = child.lease.tail_copy if child.lease is not None else None
        self._attention.fork(parent.number, child.number, child.computed, tail)

    def drop(self, sequence: int) -> None:
        self._attention.drop(sequence)

    def _step(
        self, rows: list[AttentionRow], tokens: list[int], positions: list[int], logit_rows: list[int]
    ) -> torch.Tensor:
        graphs = self._graphs if not self._adapters.groups else None  # what adapters add is in none
        if graphs is not None and graphs.plan(rows):
            inputs = self._link.send(tokens, positions, logit_rows)
            return self._link.fetch(graphs.replay(inputs.tokens, inputs.positions)[inputs.logit_rows])
        if graphs is None:
            self._attention.plan(rows)
        inputs = self._link.send(tokens, positions, logit_rows)
        logits = self._model.forward(inputs.tokens, inputs.positions, inputs.logit_rows, self._attention)
        return self._link.fetch(logits)


def _attention_row(row: StepRow) -> AttentionRow:
    sequence = row.sequence
    if sequence.lease is None:
        raise RuntimeError("a row was planned for a sequence that holds no pages")
    pages = np.asarray(sequence.lease.pages, dtype=np.int32)
    return AttentionRow(sequence.number, pages, row.start, row.count, sequence.capacity)
