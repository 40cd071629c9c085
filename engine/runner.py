"""A step's plan to tokens and logits: flat tokens, positions and page tables, one forward pass."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.adapters import Adapters
from engine.api import SamplingParams
from engine.attention import AttentionBackend, AttentionRow
from engine.attention.base import pages_for
from engine.attention.step_tables import Ints
from engine.devices import told_if_lost
from engine.graphs import DecodeGraphs
from engine.launched import Launched, Places
from engine.link import HostLink, Link
from engine.models.base import Model
from engine.sampling import DeviceChooser, Draw, DrawTables
from engine.scheduler import StepRow
from engine.sequence import Sequence

_WIDEST = Draw(SamplingParams(top_p=0.5), 0.5)
"""The draw that takes the most memory."""


class ModelRunner:
    """Runs steps on a model, its adapters and an attention backend. One thread.

    vocab_size: of the tokenizer. A model may have more rows, by which its vocabulary was padded: they have no text.
    link: to the model's device. graphs: captured steps over the same model and attention. chooser: for the model's
    device; None: all logits come to the host.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        adapters: Adapters,
        vocab_size: int,
        link: Link | None = None,
        graphs: DecodeGraphs | None = None,
        chooser: DeviceChooser | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._adapters = adapters
        self._vocab_size = vocab_size
        self._link = link or HostLink()
        self._graphs = graphs
        self._chooser = chooser

    @property
    def chooses(self) -> bool:
        """Whether tokens can be drawn where the logits are."""
        return self._chooser is not None

    @torch.inference_mode()
    def launch(self, rows: Rows[StepRow], draws: Rows[Draw | None], before: Launched | None = None) -> Launched:
        """Begins a step, behind all that were launched; where the model runs in host memory it is computed at once.

        draws: for each place (see launched.py), the last `sampled` tokens of each row, in order. before: the last
        launched step, if a row goes on from a token that it chooses. Raises DeviceLost.
        """
        step = StepTokens()
        for row in rows:
            step.add(row, before)
        self._adapters.plan((row.sequence.request.adapter, row.count) for row in rows)
        places = Places.of(draws)
        owners = [row.sequence.number for row in rows for _ in range(row.sampled)]
        indices = {owners[place]: index for index, place in enumerate(places.drawn)}
        with told_if_lost():
            return self._launch([_attention_row(row) for row in rows], step, places, indices, before)

    @torch.inference_mode()
    def try_out(self, lengths: Rows[int], page_size: int) -> None:
        """Computes prompts of these lengths side by side, and then a token more of each, all of token 0, so that the
        first request waits for no weights to be read in and no kernels to be compiled.

        Uses the first pages of the pool, which the lengths plus one must fit into: call it before anybody else does.
        """
        self._adapters.plan(())
        ends = np.cumsum([pages_for(length + 1, page_size) for length in lengths])
        tables = np.split(np.arange(ends[-1], dtype=np.int32), ends[:-1])
        draws = [_WIDEST if self.chooses else None] * len(lengths)
        under_way = []
        for starts, counts in (([0] * len(lengths), lengths), (lengths, [1] * len(lengths))):
            rows, step = [], StepTokens()
            for number, (pages, start, count) in enumerate(zip(tables, starts, counts, strict=True)):
                rows.append(AttentionRow(number, pages, start, count, start + count))
                step.extend([0] * count, start, sampled=1)
            under_way.append(self._launch(rows, step, Places.of(draws), {}, None))
        for launched in under_way:  # what both hold on to has to find room at the same time
            launched.wait()
        for number in range(len(lengths)):
            self._attention.drop(number)

    @torch.inference_mode()
    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child's lease is a fork of the parent's; from now on it has the same keys and values."""
        tail = child.lease.tail_copy if child.lease is not None else None
        self._attention.fork(parent.number, child.number, child.computed, tail)

    def drop(self, sequence: int) -> None:
        self._attention.drop(sequence)

    def _launch(
        self,
        rows: list[AttentionRow],
        step: StepTokens,
        places: Places,
        indices: dict[int, int],
        before: Launched | None,
    ) -> Launched:
        """One copy to the device, one pass, one copy back."""
        graphs = self._graphs if not self._adapters.groups else None  # what adapters add is in none
        replays = graphs is not None and graphs.plan(rows)
        if graphs is None:
            self._attention.plan(rows)
        tables = DrawTables.build(places.draws) if places.drawn else None
        flat, choosing = step.arrays, []
        if tables is not None:
            choosing = [_ints(places.drawn), _ints(places.rest), *tables.arrays]
        sent = self._link.send([*flat, *choosing])
        tokens, positions, logit_rows, *filling = (array.long() for array in sent[: len(flat)])
        if filling and before is not None and before.chosen is not None:
            gaps, sources = filling
            tokens.index_copy_(0, gaps, before.chosen.tokens[sources])
        if graphs is not None and replays:
            logits = graphs.replay(tokens, positions)
            logits = logits[: len(tokens)] if len(logit_rows) == len(tokens) else logits[logit_rows]
        else:
            logits = self._model.forward(tokens, positions, logit_rows, self._attention)
        logits = logits[:, : self._vocab_size]
        if self._chooser is None or tables is None:
            return Launched(places, self._link.fetch([logits]), None, indices)
        drawn, rest, *numbers = sent[len(flat) :]
        chosen = self._chooser.choose(logits[drawn.long()] if places.rest else logits, tables, numbers)
        arrival = self._link.fetch([chosen.tokens.int(), chosen.verdicts, logits[rest.long()]])
        return Launched(places, arrival, chosen, indices)


@dataclass(slots=True)
class StepTokens:
    """The flat tokens of a step and their positions; which of them have logits, its places; and which of them come from
    where in the tokens that the step before chooses."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    @property
    def arrays(self) -> list[Ints]:
        """In the order of the fields; the last two only where there are any."""
        filling = (self.gaps, self.sources) if self.gaps else ()
        return [_ints(numbers) for numbers in (self.tokens, self.positions, self.logit_rows, *filling)]

    def add(self, row: StepRow, before: Launched | None) -> None:
        sequence = row.sequence
        tokens = sequence.tokens[row.start : min(row.start + row.known, sequence.num_tokens)].tolist()
        if len(tokens) < row.known:  # the last one, which is expected
            if before is None or sequence.number not in before.indices:
                raise RuntimeError("a row goes on from a token that no launched step chooses")
            self.gaps.append(len(self.tokens) + len(tokens))
            self.sources.append(before.indices[sequence.number])
            tokens.append(0)
        self.extend([*tokens, *row.drafts], row.start, row.sampled)

    def extend(self, tokens: list[int], start: int, sampled: int) -> None:
        self.tokens += tokens
        self.positions += range(start, start + len(tokens))
        self.logit_rows += range(len(self.tokens) - sampled, len(self.tokens))


def _ints(numbers: list[int]) -> Ints:
    return np.array(numbers, dtype=np.int32)


def _attention_row(row: StepRow) -> AttentionRow:
    sequence = row.sequence
    if sequence.lease is None:
        raise RuntimeError("a row was planned for a sequence that holds no pages")
    pages = np.asarray(sequence.lease.pages, dtype=np.int32)
    return AttentionRow(sequence.number, pages, row.start, row.count, sequence.capacity)
