"""The CPU's attention against attention spelled out in float64, whoever stands beside whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from engine.attention import AttentionRow, KVShape, LayerAttention, TorchAttention
from engine.attention.groups import group_rows
from engine.attention.working import _PRODUCT_BYTES, WorkingCopies

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = (LayerAttention(), LayerAttention(window=37, scale=0.2), LayerAttention(softcap=3.0))
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
SHAPE = KVShape(len(LAYERS), KV_HEADS, HEAD_DIM, num_pages=1, page_size=1, dtype=torch.float32)
NO_PAGES = np.empty(0, dtype=np.int32)


@dataclass
class Text:
    """Keys and values of one sequence, [layers, tokens, KV_HEADS, HEAD_DIM]; the first `computed` are in use."""

    k: torch.Tensor
    v: torch.Tensor
    computed: int = 0


@dataclass
class Rig:
    """Sequences that live in their working copies alone, each step compared with `expected`."""

    random: np.random.Generator
    attention: TorchAttention = field(default_factory=lambda: TorchAttention(SHAPE, LAYERS))
    texts: dict[int, Text] = field(default_factory=dict)

    def made(self, *sizes: int) -> torch.Tensor:
        return torch.from_numpy(self.random.standard_normal(sizes).astype(np.float32))

    def add(self, number: int, tokens: int) -> None:
        sizes = (len(LAYERS), tokens, KV_HEADS, HEAD_DIM)
        self.texts[number] = Text(self.made(*sizes), self.made(*sizes))

    def step(self, counts: dict[int, int]) -> list[torch.Tensor]:
        """Computes so many tokens of each; gives the outputs [T, HEADS, HEAD_DIM] of each layer."""
        texts = [self.texts[number] for number in counts]
        spans = [slice(t.computed, t.computed + c) for t, c in zip(texts, counts.values(), strict=True)]
        rows = [
            AttentionRow(number, NO_PAGES, span.start, span.stop - span.start, len(text.k[0]))
            for number, text, span in zip(counts, texts, spans, strict=True)
        ]
        self.attention.plan(rows)
        outputs = []
        for layer, options in enumerate(LAYERS):
            q = self.made(sum(counts.values()), HEADS, HEAD_DIM)
            k = torch.cat([text.k[layer, span] for text, span in zip(texts, spans, strict=True)])
            v = torch.cat([text.v[layer, span] for text, span in zip(texts, spans, strict=True)])
            outputs.append(self.attention.run(layer, q, k, v))
            queries = q.split(list(counts.values()))
            wanted = [expected(*one, layer, options) for one in zip(queries, texts, spans, strict=True)]
            torch.testing.assert_close(outputs[-1], torch.cat(wanted), rtol=1e-4, atol=1e-5)
        for text, span in zip(texts, spans, strict=True):
            text.computed = span.stop
        return outputs


def expected(q: torch.Tensor, text: Text, span: slice, layer: int, options: LayerAttention) -> torch.Tensor:
    """In float64: softmax(q k^T) v over the keys that each token sees."""
    k = text.k[layer, : span.stop].double().repeat_interleave(HEADS // KV_HEADS, dim=1)
    v = text.v[layer, : span.stop].double().repeat_interleave(HEADS // KV_HEADS, dim=1)
    scores = torch.einsum("thd,shd->hts", q.double(), k) * (options.scale or HEAD_DIM**-0.5)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    own, theirs = torch.arange(span.start, span.stop)[:, None], torch.arange(span.stop)
    hidden = theirs > own
    if options.window is not None:
        hidden |= theirs <= own - options.window
    scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v).float()


@pytest.mark.parametrize("seed", range(4))
def test_random_company(seed: int) -> None:
    random = np.random.default_rng(seed)
    rig, next_number = Rig(random), 0
    for _ in range(25):
        while len(rig.texts) < random.integers(2, 8):
            rig.add(next_number, int(random.choice([300, 700, 1300])))
            next_number += 1
        counts = {}
        for number, text in rig.texts.items():
            left = len(text.k[0]) - text.computed
            if left and random.random() < 0.8:
                count = int(random.choice([1, 1, 1, 3, 20, 150, 400]))
                counts[number] = min(left, count)
        if counts:
            rig.step(counts)
        for number in [n for n in rig.texts if random.random() < 0.1]:
            rig.attention.drop(number)
            del rig.texts[number]
        if rig.texts and random.random() < 0.2:
            source = int(random.choice(list(rig.texts)))
            text = rig.texts[source]
            if text.computed > 0:
                rig.attention.fork(source, next_number, text.computed, None)
                sizes = (len(LAYERS), len(text.k[0]) - text.computed, KV_HEADS, HEAD_DIM)
                k, v = (torch.cat((past[:, : text.computed], rig.made(*sizes)), 1) for past in (text.k, text.v))
                rig.texts[next_number] = Text(k, v, text.computed)
                next_number += 1
    for number in list(rig.texts):
        rig.attention.drop(number)
    assert rig.attention.sequences == 0


def test_guesses_that_were_not_kept_are_written_over() -> None:
    rig = Rig(np.random.default_rng(1))
    rig.add(0, 300)
    rig.step({0: 100})
    rig.step({0: 4})
    text = rig.texts[0]
    text.computed -= 3
    text.k[:, text.computed :] = rig.made(*text.k[:, text.computed :].shape)
    rig.step({0: 1})
    rig.step({0: 2})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_own_sequence(bad: float) -> None:
    rig = Rig(np.random.default_rng(2))
    rig.add(0, 200)
    rig.add(1, 200)
    rig.step({0: 150, 1: 100})
    rig.attention.plan([AttentionRow(0, NO_PAGES, 150, 1, 200)])
    for layer in range(len(LAYERS)):
        broken = torch.full((1, KV_HEADS, HEAD_DIM), bad)
        rig.attention.run(layer, rig.made(1, HEADS, HEAD_DIM), broken, broken)
    rig.step({1: 1})
    rig.attention.drop(0)
    rig.add(2, 200)  # in the place that 0 had
    rig.step({2: 10, 1: 1})
    rig.step({2: 1, 1: 1})


def copies_of(*lengths: int) -> tuple[WorkingCopies, list[AttentionRow]]:
    """Sequences 0, 1, ... of these lengths, each about to compute one token."""
    copies = WorkingCopies(SHAPE, torch.float32)
    rows = []
    for number, length in enumerate(lengths):
        copies.make(number, length + 1).length = length + 1
        rows.append(AttentionRow(number, NO_PAGES, length, 1, 1024))
    return copies, rows


def spans(copies: WorkingCopies, rows: list[AttentionRow]) -> Iterator[tuple[int, int, int, int]]:
    for group in group_rows(rows, [copies[row.sequence] for row in rows], [None]):
        yield group.room.size, group.first, group.last, group.count


def test_sequences_share_a_product_until_that_wastes_more_than_another_costs() -> None:
    token_bytes = 2 * KV_HEADS * HEAD_DIM * 4
    long = _PRODUCT_BYTES // token_bytes  # a place of which another sequence may waste almost all, and a second not
    copies, rows = copies_of(10, long - 1, 20, 30, 255, 300)
    assert copies[1].room.size == long
    assert list(spans(copies, rows)) == [(256, 0, 3, 1), (long, 0, 2, 1), (384, 0, 1, 1)]
    assert [copies[n].room.size for n in range(6)] == [256, long, long, 256, 256, 384]


def test_a_free_place_is_computed_along_but_not_more_than_half() -> None:
    copies, rows = copies_of(*[100] * 9)
    for gone in (1, 2):
        copies.drop(gone)
    left = [row for row in rows if row.sequence not in (1, 2)]
    assert list(spans(copies, left)) == [(256, 0, 9, 1)]
    for gone in (3, 4, 5, 6):
        copies.drop(gone)
    left = [row for row in left if row.sequence in (0, 7, 8)]
    assert list(spans(copies, left)) == [(256, 0, 1, 1), (256, 7, 9, 1)]
    copies.make(20, 5)
    assert copies[20].place == 1, "the first free place is taken"


def test_a_sequence_that_outgrows_its_place_joins_a_larger_room_in_use() -> None:
    copies, _ = copies_of(100, 600)
    assert copies[0].room is not copies[1].room
    assert copies.reserve(0, 257).room is copies[1].room
    copies.drop(1)
    copies.drop(1)
    assert len(copies) == 1
    assert 1 not in copies


def test_empty_rooms_are_kept_for_the_next_sequence_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, _ = copies_of(100)
    first = copies[0].room
    copies.drop(0)
    assert copies.make(1, 200).room is first
    copies.drop(1)
    other = copies.make(2, 1000).room
    assert other.size == 1024, "an empty room is only used for its own size"
    monkeypatch.setattr("engine.attention.working._SPARE_BYTES", other.kv.nbytes)
    copies.drop(2)
    assert copies.make(3, 1000).room is other
    assert copies.make(4, 100).room is other
    copies.drop(4)
    copies.drop(3)
    assert copies.make(5, 100).room is not first, "the room that was empty for longest is given up"


def test_a_sequence_keeps_what_it_holds_when_it_moves() -> None:
    copies = WorkingCopies(SHAPE, torch.bfloat16)
    held = torch.randn(2, len(LAYERS), KV_HEADS, 256, HEAD_DIM).bfloat16()
    for number in range(5):  # the room grows twice
        copy = copies.make(number, 256)
        copy.kv[:] = held + number
        copy.length = 256
    copies.reserve(3, 300)
    for number in range(5):
        assert torch.equal(copies[number].kv[..., :256, :], held + number)
