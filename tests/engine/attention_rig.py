"""Sequences in pages of a small pool, whose attention is compared with attention spelled out in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from cache import TailCopy
from engine.attention import AttentionRow, CpuAttention, KVShape, LayerAttention

LAYERS = (LayerAttention(), LayerAttention(window=37, scale=0.2), LayerAttention(softcap=3.0))


@dataclass(frozen=True)
class Text:
    """Queries [layers, tokens, heads, head_dim], and keys and values alike, of one sequence."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.q.shape[1]


@dataclass
class Held:
    """A sequence in the pool: its text, its pages, how many tokens are computed, and the first that may be rejected."""

    text: Text
    pages: np.ndarray
    computed: int = 0
    own: int = 0


class Rig:
    """Every step is compared with `expected`. Pages are in no order, and hold what is not a number before their use."""

    def __init__(
        self,
        seed: int = 0,
        *,
        heads: int = 6,
        kv_heads: int = 2,
        head_dim: int = 8,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
        layers: tuple[LayerAttention, ...] = LAYERS,
        pool_tokens: int = 4096,
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.heads, self.layers = heads, layers
        self.shape = KVShape(len(layers), kv_heads, head_dim, pool_tokens // page_size, page_size, dtype)
        self.attention = CpuAttention(self.shape, layers)
        self.sequences: dict[int, Held] = {}
        self._free = list(self.random.permutation(self.shape.num_pages))
        self._used: Counter[int] = Counter()
        self._spoil(np.array(self._free, dtype=np.int32))

    def text(self, tokens: int) -> Text:
        s, layers = self.shape, len(self.layers)
        sizes = ((layers, tokens, heads, s.head_dim) for heads in (self.heads, s.num_kv_heads, s.num_kv_heads))
        return Text(*(torch.from_numpy(self.random.standard_normal(size).astype(np.float32)) for size in sizes))

    def add(self, number: int, text: Text | int) -> Held:
        """A sequence that has pages for all its tokens, and nothing computed."""
        made = self.text(text) if isinstance(text, int) else text
        held = self.sequences[number] = Held(made, self._pages(-(-made.tokens // self.shape.page_size)))
        return held

    def room_for(self, tokens: int) -> bool:
        return len(self._free) * self.shape.page_size >= tokens + self.shape.page_size

    def step(self, counts: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """Computes so many tokens of each; gives the outputs [layers, count, heads, head_dim] of each."""
        held = {number: self.sequences[number] for number in counts}
        found = self.run(counts)
        for number, one in held.items():
            span = slice(one.computed, one.computed + counts[number])
            wanted = expected(one.text, span, self.layers, self.shape.dtype)
            torch.testing.assert_close(found[number].double(), wanted, rtol=1e-5, atol=1e-5)
            one.computed = span.stop
        return found

    def run(self, counts: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """The outputs of a step, which may be anything."""
        held = [self.sequences[number] for number in counts]
        spans = [slice(one.computed, one.computed + count) for one, count in zip(held, counts.values(), strict=True)]
        self.attention.plan(
            [
                AttentionRow(number, one.pages, one.computed, count, one.text.tokens)
                for (number, count), one in zip(counts.items(), held, strict=True)
            ]
        )
        outputs = []
        for layer in range(len(self.layers)):
            q, k, v = (
                torch.cat([getattr(one.text, name)[layer, span] for one, span in zip(held, spans, strict=True)])
                for name in "qkv"
            )
            outputs.append(self.attention.run(layer, q, k, v))
        parts = torch.stack(outputs).split(list(counts.values()), dim=1)
        return dict(zip(counts, parts, strict=True))

    def reject(self, number: int, tokens: int) -> None:
        """The last tokens were guesses, and others will stand in their place."""
        held = self.sequences[number]
        held.computed -= tokens
        held.text = self._going_on(held, held.text.tokens - held.computed)

    def fork(self, source: int, target: int, more: int) -> None:
        """`target` has what is computed of `source`, and `more` tokens of its own to come."""
        held, size = self.sequences[source], self.shape.page_size
        full, rest = divmod(held.computed, size)
        own = self._pages(-(-(held.computed + more) // size) - full)
        self._used.update(held.pages[:full].tolist())
        tail = TailCopy(int(held.pages[full]), int(own[0]), rest) if rest else None
        self.attention.fork(source, target, held.computed, tail)
        pages = np.concatenate((held.pages[:full], own))
        held.own = held.computed
        self.sequences[target] = Held(self._going_on(held, more), pages, held.computed, held.own)

    def drop(self, number: int) -> None:
        """Its pages that nobody else has are free for others."""
        pages = self.sequences.pop(number).pages.tolist()
        self.attention.drop(number)
        self._used.subtract(pages)
        left = [page for page in pages if self._used[page] == 0]
        if left:
            self._spoil(np.array(left, dtype=np.int32))
        self._free += left

    def _going_on(self, held: Held, tokens: int) -> Text:
        """What is computed, and other tokens behind it."""
        past, other = held.text, self.text(tokens)
        joined = (torch.cat((getattr(past, name)[:, : held.computed], getattr(other, name)), 1) for name in "qkv")
        return Text(*joined)

    def _pages(self, count: int) -> np.ndarray:
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, "the pool of the test is too small"
        self._used.update(int(page) for page in taken)
        return np.array(taken, dtype=np.int32)

    def _spoil(self, pages: np.ndarray) -> None:
        """Somebody leaves what is not a number in all of them."""
        size = self.shape.page_size
        tokens = len(pages) * size
        self.attention.plan([AttentionRow(-1, pages[i : i + 1], 0, size, size) for i in range(len(pages))])
        queries = torch.zeros(tokens, self.heads, self.shape.head_dim)
        bad = torch.full((tokens, self.shape.num_kv_heads, self.shape.head_dim), float("nan"))
        for layer in range(len(self.layers)):
            self.attention.run(layer, queries, bad, bad)


def expected(text: Text, span: slice, layers: tuple[LayerAttention, ...], dtype: torch.dtype) -> torch.Tensor:
    """In float64: softmax(q k^T) v over the keys that each token sees, as the pool keeps them."""
    group, head_dim = text.q.shape[2] // text.k.shape[2], text.q.shape[3]
    own, theirs = torch.arange(span.start, span.stop)[:, None], torch.arange(span.stop)
    outputs = []
    for layer, options in enumerate(layers):
        k, v = (stored(x[layer, : span.stop], dtype).double().repeat_interleave(group, 1) for x in (text.k, text.v))
        scores = torch.einsum("thd,shd->hts", text.q[layer, span].double(), k)
        scores *= options.scale if options.scale is not None else head_dim**-0.5
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        hidden = theirs > own
        if options.window is not None:
            hidden |= theirs <= own - options.window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hts,shd->thd", weights, v))
    return torch.stack(outputs)


def stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values [..., head_dim] float32 as a pool of this type gives them back, in float32.

    int8: q * largest / 127, q in -127 .. 127; largest of each row in bfloat16.
    """
    if dtype != torch.int8:
        return x.to(dtype).float()
    largest = x.abs().amax(-1, keepdim=True).bfloat16().float()
    step = (largest * torch.tensor(1 / 127)).clamp_min(torch.finfo(torch.float32).tiny)
    return (x / step).round().clamp(-127, 127) * step
