"""Guesses of a second, smaller model of the same vocabulary (Leviathan et al., arXiv 2211.17192).

It follows each sequence with keys and values of its own:

    tokens    |<-------- known -------->|<- behind ->|<- drafts ->|
              0                                      ask          the last draft is not computed

What it has computed for drafts that were kept stays; where the sequence went on differently, it is computed anew over
it. So the drafter needs to be told nothing: it compares what it has computed with what the sequence now is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cache import OutOfPages, PageIds, PagePool
from engine.api import TokenIds
from engine.attention import AttentionRow, build_attention
from engine.attention.base import pages_for
from engine.attention.kv_scales import Fp8
from engine.devices import Device
from engine.link import link_to, send_inputs
from engine.models.base import Model
from engine.speculation.drafter import CHECKING, Ask

PAGE_SIZE = 16
TRIED_OUT_MORE = 2
"""Tokens behind each prompt that is tried out: a guess, and one behind it."""


@dataclass(slots=True)
class _Followed:
    """The tokens that have keys and values in the draft model: the first `known` of the sequence, then `drafts`."""

    known: int = 0
    drafts: list[int] = field(default_factory=list)
    pages: PageIds = field(default_factory=lambda: np.empty(0, dtype=np.int32))

    def catch_up(self, tokens: TokenIds) -> int:
        """Where to go on: behind all that is computed and still true, at the last token at the latest."""
        for draft in self.drafts:
            if self.known == len(tokens) or tokens[self.known] != draft:
                break
            self.known += 1
        self.drafts.clear()
        self.known = min(self.known, len(tokens) - 1)
        return self.known


@dataclass(frozen=True, slots=True)
class _Row:
    """What is computed next for an ask: `tokens`, from `start` on."""

    ask: Ask
    start: int
    tokens: TokenIds

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def guesses(self) -> bool:
        return self.end >= len(self.ask.tokens)


class ModelDrafter:
    """Implements `Drafter`: greedy guesses of a model, all sequences in one batch.

    vocab_size: of the tokenizer; a model may have more rows. kv_dtype: of keys and values; fp8: how they are kept where
    that is e4m3. At most `max_batched_tokens` are computed in one go: a sequence that is further behind, with a long
    prompt, catches up over several steps, and gets its first guesses at the last of them. One that has outgrown the
    draft model's context gets none, nor does one that finds no room among the `pool_tokens` that all of them have.
    """

    cost = CHECKING + 0.2
    """Supposing that the draft model is at least five times as fast."""

    def __init__(
        self,
        model: Model,
        vocab_size: int,
        kv_dtype: torch.dtype,
        max_batched_tokens: int,
        pool_tokens: int,
        device: Device,
        fp8: Fp8 | None = None,
    ) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._max_batched_tokens = max_batched_tokens
        spec, num_pages = model.spec, max(1, pool_tokens // PAGE_SIZE)
        self._pool = PagePool(num_pages, PAGE_SIZE)  # no page is ever shared
        shape, choice = spec.kv_shape(num_pages, PAGE_SIZE, kv_dtype), device.attention(spec.head_dim, kv_dtype)
        self._attention = build_attention(choice, shape, spec.layers, spec.num_heads, device.place, fp8=fp8)
        self._link = link_to(device.place)
        self._followed: dict[int, _Followed] = {}

    @torch.inference_mode()
    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        proposed: dict[int, list[int]] = {ask.number: [] for ask in asks}
        rows = self._behind(asks)
        while rows:
            guesses = self._run(rows)
            following = []
            for row, guess in zip(rows, guesses, strict=True):
                if not row.guesses:
                    continue
                drafts = proposed[row.ask.number]
                drafts.append(guess)
                if len(drafts) < row.ask.at_most:
                    self._followed[row.ask.number].drafts.append(guess)
                    following.append(_Row(row.ask, row.end, np.array([guess], dtype=np.int32)))
            rows = following
        return list(proposed.values())

    def drop(self, number: int) -> None:
        if (followed := self._followed.pop(number, None)) is not None:
            self._pool.free(followed.pages)
            self._attention.drop(number)

    def try_out(self, lengths: Sequence[int]) -> None:
        """Guesses behind prompts of these lengths, all of token 0, so that weights are read in and kernels compiled. A
        prompt that has no room in context or pool is left out."""
        asks = [
            Ask(-1 - index, np.zeros(length, dtype=np.int32), TRIED_OUT_MORE, length + TRIED_OUT_MORE)
            for index, length in enumerate(lengths)
        ]
        self.propose(asks)
        for ask in asks:
            self.drop(ask.number)

    def _behind(self, asks: Sequence[Ask]) -> list[_Row]:
        """What each sequence has that is not computed yet, as far as one go allows."""
        rows, left = [], self._max_batched_tokens
        for ask in asks:
            if len(ask.tokens) + ask.at_most > self._model.spec.context_length:
                continue
            followed = self._followed.setdefault(ask.number, _Followed())
            if not self._has_room(followed, len(ask.tokens) + ask.at_most):
                continue
            start = followed.catch_up(ask.tokens)
            if tokens := min(left, len(ask.tokens) - start):
                left -= tokens
                followed.known = start + tokens
                rows.append(_Row(ask, start, ask.tokens[start : followed.known]))
        return rows

    def _has_room(self, followed: _Followed, tokens: int) -> bool:
        """Takes the pages for so many tokens, if there are."""
        missing = pages_for(tokens, PAGE_SIZE) - len(followed.pages)
        if missing > 0:
            last = int(followed.pages[-1]) if len(followed.pages) else None
            try:
                followed.pages = np.concatenate((followed.pages, self._pool.alloc(missing, after=last)))
            except OutOfPages:
                return False
        return True

    def _run(self, rows: Sequence[_Row]) -> list[int]:
        """The most likely token behind each row."""
        context = self._model.spec.context_length
        self._attention.plan(
            [
                AttentionRow(
                    row.ask.number,
                    self._followed[row.ask.number].pages,
                    row.start,
                    len(row.tokens),
                    min(row.ask.capacity, context),
                )
                for row in rows
            ]
        )
        inputs = send_inputs(
            self._link,
            np.concatenate([row.tokens for row in rows]).tolist(),
            [position for row in rows for position in range(row.start, row.end)],
            (np.cumsum([len(row.tokens) for row in rows]) - 1).tolist(),
        )
        logits = self._model.forward(inputs.tokens, inputs.positions, inputs.logit_rows, self._attention)
        guesses: list[int] = logits[:, : self._vocab_size].argmax(-1).tolist()
        return guesses
