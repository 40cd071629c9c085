"""A step's plan to logits: flat tokens, positions and page tables, one forward pass."""

from __future__ import annotations

import numpy as np
import torch

from engine.adapters import Adapters
from engine.attention import AttentionBackend, AttentionRow
from engine.models.base import Model
from engine.scheduler import StepRow
from engine.sequence import Sequence

_WARM_UP = 16
"""Tokens, enough for every kernel to be compiled."""


class ModelRunner:
    """Runs steps on a model, its adapters and an attention backend. One thread.

    vocab_size: of the tokenizer. A model may have more rows, by which its vocabulary was padded: they have no text.
    """

    def __init__(self, model: Model, attention: AttentionBackend, adapters: Adapters, vocab_size: int) -> None:
        self._model = model
        self._attention = attention
        self._adapters = adapters
        self._vocab_size = vocab_size

    @torch.inference_mode()
    def run(self, rows: list[StepRow]) -> torch.Tensor:
        """Logits [S, vocab_size] float32 of the last `sampled` tokens of each row, in order."""
        self._attention.plan([_attention_row(row) for row in rows])
        self._adapters.plan((row.sequence.request.adapter, row.count) for row in rows)
        tokens: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        for row in rows:
            tokens += row.sequence.tokens[row.start : row.start + row.known].tolist()
            tokens += row.drafts
            positions += range(row.start, row.start + row.count)
            logit_rows += range(len(tokens) - row.sampled, len(tokens))
        flat = torch.from_numpy(np.array((tokens, positions), dtype=np.int64))
        wanted = torch.from_numpy(np.array(logit_rows, dtype=np.int64))
        logits = self._model.forward(flat[0], flat[1], wanted, self._attention)
        return logits if logits.shape[1] == self._vocab_size else logits[:, : self._vocab_size]

    @torch.inference_mode()
    def warm_up(self, num_pages: int, page_size: int) -> None:
        """Runs a prompt and a token through the model, so that the first request does not wait for weights to be read
        in. Uses the first pages of the pool: call it before anybody else does.
        """
        count = min(_WARM_UP, self._model.spec.context_length - 1, num_pages * page_size - 1)
        if count < 1:
            return
        pages = np.arange(-(-(count + 1) // page_size), dtype=np.int32)
        for start, length in ((0, count), (count, 1)):
            self._attention.plan([AttentionRow(0, pages, start, length, count + 1)])
            span = torch.arange(start, start + length)
            self._model.forward(torch.zeros_like(span), span, torch.zeros(1, dtype=torch.int64), self._attention)
        self._attention.drop(0)

    @torch.inference_mode()
    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child's lease is a fork of the parent's; from now on it has the same keys and values."""
        tail = child.lease.tail_copy if child.lease is not None else None
        self._attention.fork(parent.number, child.number, child.computed, tail)

    def drop(self, sequence: int) -> None:
        self._attention.drop(sequence)


def _attention_row(row: StepRow) -> AttentionRow:
    sequence = row.sequence
    if sequence.lease is None:
        raise RuntimeError("a row was planned for a sequence that holds no pages")
    pages = np.asarray(sequence.lease.pages, dtype=np.int32)
    return AttentionRow(sequence.number, pages, row.start, row.count, sequence.capacity)
