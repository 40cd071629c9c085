"""Sequences over real leases, each step computed by attention backends and spelled out beside them in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from cache import Lease, OutOfPages, PagePool, PrefixCache
from engine.attention import AttentionBackend, AttentionRow, KVShape, LayerAttention
from engine.attention.kv_scales import FP8, KVScales, from_fp8
from engine.attention.paged_kv import PagedKV

LAYERS = (
    LayerAttention(),
    LayerAttention(window=11, scale=0.2),
    LayerAttention(softcap=3.0),
    LayerAttention(),
    LayerAttention(window=1),
)
VOCABULARY = 7  # few tokens, so that random texts share prefixes
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""By the dtype that is attended in; torch_paged.py rounds the scores of layers with soft caps to it."""


@dataclass
class Text:
    """tokens: int32, of which the first `computed` have keys and values. lease: None while it waits."""

    tokens: np.ndarray
    lease: Lease | None = None
    computed: int = 0


MakeBackend = Callable[[PagedKV], AttentionBackend]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
RunStep = Callable[[Sequence[Inputs]], Sequence[torch.Tensor]]
"""From queries, keys and values of each layer to what is attended to."""


class PagedRig:
    """Keys and values of a token depend on it and its place alone, so that whatever shares a prefix shares pages.

    What is spelled out sees the numbers as the pages hold them, so that only how they are attended to is compared.
    """

    def __init__(
        self,
        make: Sequence[MakeBackend],
        *,
        page_size: int,
        heads: int,
        kv_heads: int = 2,
        head_dim: int = 8,
        num_pages: int = 64,
        dtype: torch.dtype = torch.float32,
        layers: Sequence[LayerAttention] = LAYERS,
        seed: int = 0,
        device: torch.device = CPU,
        scales: KVScales | None = None,
        attend_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """scales, attend_dtype: as for PagedKV."""
        self.device = device
        self.random = np.random.default_rng(seed)
        self.layers = layers
        self.heads = heads
        shape = KVShape(len(layers), kv_heads, head_dim, num_pages, page_size, dtype)
        self.cache = PrefixCache(PagePool(num_pages, page_size))
        self.stores = [PagedKV(shape, device, scales, attend_dtype) for _ in make]
        self.backends = [one(store) for one, store in zip(make, self.stores, strict=True)]
        self.texts: dict[int, Text] = {}
        self.tolerance = TOLERANCE[self.stores[0].attend_dtype]
        self._made = 0
        self._tokens = self.numbers(2, len(layers), VOCABULARY, kv_heads, head_dim)
        self._places = self.numbers(2, len(layers), 512, kv_heads, head_dim)
        for store in self.stores:  # whoever reads a page that nobody has written shows it
            for layer in range(len(layers)):
                spoil(store.layer(layer))

    def numbers(self, *sizes: int) -> torch.Tensor:
        return torch.from_numpy(self.random.standard_normal(sizes).astype(np.float32)).to(self.device)

    def add(self, length: int) -> int:
        """A text of so many tokens that continues a text there is, or is new. Gives its number."""
        tokens = self.random.integers(0, VOCABULARY, length)
        if self.texts and self.random.random() < 0.5:
            other = self.texts[int(self.random.choice(list(self.texts)))].tokens
            shared = int(self.random.integers(0, min(len(other), length)))
            tokens[:shared] = other[:shared]
        return self._join(Text(tokens.astype(np.int32)))

    def step(
        self,
        counts: dict[int, int],
        *,
        bad: int | None = None,
        keep: int | None = None,
        padding: int = 0,
        run: RunStep | None = None,
    ) -> list[torch.Tensor]:
        """Computes so many tokens of each; gives the first backend's outputs [T, heads, head_dim] of each layer.

        bad: a text whose keys and values are no numbers in this step. keep: only so many tokens count, the rest were
        guesses. padding: rows of nobody with which the first backend's step is filled up. run: runs all layers of the
        first backend's step, None: one after the other.
        """
        starts = {number: self.texts[number].computed for number in counts}
        spans = {number: slice(start, start + counts[number]) for number, start in starts.items()}
        rows = [self.row(number, span) for number, span in spans.items()]
        for index, backend in enumerate(self.backends):
            backend.plan(rows + backend.padding(padding) if padding and index == 0 else rows)
        inputs = [self._inputs(layer, spans, bad) for layer in range(len(self.layers))]
        padded = [tuple(torch.cat((x, x.new_ones(padding, *x.shape[1:]))) for x in given) for given in inputs]
        first = run if run is not None else partial(run_layers, self.backends[0])
        outputs = [output[: sum(counts.values())] for output in first(padded)]
        others = [run_layers(backend, inputs) for backend in self.backends[1:]]
        for layer, given in enumerate(inputs):
            self._compare(layer, given[0], spans, bad, [outputs[layer], *(other[layer] for other in others)])
        for number, span in spans.items():
            text = self.texts[number]
            text.computed = span.stop if keep is None else span.start + keep
            if number != bad:
                text.lease.commit(text.tokens[: text.computed])
        return outputs

    def row(self, number: int, span: slice) -> AttentionRow:
        """Takes pages where they are missing; raises OutOfPages."""
        text = self.texts[number]
        assert text.lease is not None
        text.lease.reserve(span.stop)
        pages = np.asarray(text.lease.pages, dtype=np.int32)
        return AttentionRow(number, pages, span.start, span.stop - span.start, len(text.tokens))

    def start(self, number: int) -> bool:
        """Begins, or resumes from what is cached. False: there is no room."""
        text = self.texts[number]
        lease = self.cache.acquire(text.tokens, limit=len(text.tokens) - 1)
        try:
            lease.reserve(lease.cached_tokens + 1)
        except OutOfPages:
            lease.release()
            return False
        text.lease, text.computed = lease, lease.cached_tokens
        return True

    def preempt(self, number: int) -> None:
        text = self.texts[number]
        for backend in self.backends:
            backend.drop(number)
        if text.lease is not None:
            text.lease.release()
        text.lease, text.computed = None, 0

    def drop(self, number: int) -> None:
        self.preempt(number)
        del self.texts[number]

    def fork(self, number: int) -> int:
        """Another end for a text, from where it is. Gives its number."""
        text = self.texts[number]
        assert text.lease is not None
        tokens = text.tokens.copy()
        tokens[text.computed :] = self.random.integers(0, VOCABULARY, len(tokens) - text.computed)
        child = self._join(Text(tokens, text.lease.fork(), text.computed))
        for backend in self.backends:
            backend.fork(number, child, text.computed, self.texts[child].lease.tail_copy)
        return child

    def room_for(self, counts: dict[int, int]) -> dict[int, int]:
        """The counts for which there are pages; who finds none is preempted."""
        granted = {}
        for number, count in counts.items():
            text = self.texts[number]
            try:
                text.lease.reserve(text.computed + count)
                granted[number] = count
            except OutOfPages:
                self.preempt(number)
        return granted

    def wanted(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Spelled out for numbers as they are stored and attended with."""
        store = self.stores[0]
        k, v = store.stored(layer, k, v)
        if store.scaled:
            k, v = (from_fp8(x, scale, torch.float32) for x, scale in zip((k, v), store.scales(layer), strict=True))
        return spelled_out(q.to(store.attend_dtype), k, v, self.layers[layer])

    def _join(self, text: Text) -> int:
        self._made += 1
        self.texts[self._made] = text
        return self._made

    def _kv(self, layer: int, text: Text, span: slice) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.from_numpy(text.tokens[span].astype(np.int64)).to(self.device)
        return tuple((self._tokens[:, layer, tokens] + self._places[:, layer, span]).unbind())

    def _inputs(self, layer: int, spans: dict[int, slice], bad: int | None) -> Inputs:
        q = self.numbers(sum(map(length, spans.values())), self.heads, self._tokens.shape[-1])
        new = [self._kv(layer, self.texts[number], span) for number, span in spans.items()]
        k, v = (torch.cat(parts) for parts in zip(*new, strict=True))
        if bad is not None:
            broken = self._is(bad, spans)
            k[broken], v[broken] = float("nan"), float("inf")
        return q, k, v

    def _compare(
        self,
        layer: int,
        q: torch.Tensor,
        spans: dict[int, slice],
        bad: int | None,
        outputs: Sequence[torch.Tensor],
    ) -> None:
        counts = list(map(length, spans.values()))
        wanted = [
            self.wanted(layer, part, *self._kv(layer, self.texts[number], slice(0, span.stop)))
            for part, (number, span) in zip(q.split(counts), spans.items(), strict=True)
        ]
        good = ~self._is(bad, spans)
        for output in outputs:
            close = {"rtol": self.tolerance, "atol": self.tolerance}
            torch.testing.assert_close(output[good].float(), torch.cat(wanted)[good], **close)

    def _is(self, number: int | None, spans: dict[int, slice]) -> torch.Tensor:
        """[T] bool: the tokens of one text; None: of none."""
        owners = np.repeat(list(spans), list(map(length, spans.values())))
        return torch.from_numpy(owners == (-1 if number is None else number)).to(self.device)


def run_layers(backend: AttentionBackend, inputs: Sequence[Inputs]) -> list[torch.Tensor]:
    return [backend.run(layer, *given) for layer, given in enumerate(inputs)]


def length(span: slice) -> int:
    return int(span.stop - span.start)


def spoil(pages: torch.Tensor) -> None:
    """Every element is NaN, which torch cannot fill 8-bit floats with everywhere."""
    if pages.dtype == FP8:
        pages.view(torch.uint8).fill_(0x7F)
    else:
        pages.fill_(float("nan"))


def spelled_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: LayerAttention) -> torch.Tensor:
    """softmax(q k^T) v in float64 over the keys that each token sees; q is of the last tokens of k and v."""
    group, size = q.shape[1] // k.shape[1], len(k)
    k, v = k.double().repeat_interleave(group, dim=1), v.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->hts", q.double(), k) * (options.scale or q.shape[-1] ** -0.5)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    theirs = torch.arange(size, device=q.device)
    own = theirs[size - len(q) :, None]
    hidden = theirs > own
    if options.window is not None:
        hidden |= theirs <= own - options.window
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v).float()
