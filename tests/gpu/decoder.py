"""A decoder with random weights over our attention backends, and steps of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.base import AttentionBackend, AttentionRow
from engine.narrow import RowScaled, narrow_linear
from tests.gpu.costs import Shape, own_layers
from tests.gpu.operations import Operations

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights as F.linear takes them, [N, K] each."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class Products:
    """The products of one layer."""

    qkv: Product
    out: Product
    gate_up: Product
    down: Product


class RandomDecoder:
    """own: how many layers have weights of their own. The others use them again, so that as many bytes are read.

    narrow: the type of 8 bits that the weights of layers are rounded to; None: they are as the rest, in dtype.
    """

    def __init__(
        self,
        shape: Shape,
        own: int,
        operations: Operations,
        device: torch.device,
        dtype: torch.dtype,
        narrow: torch.dtype | None = None,
    ) -> None:
        self.shape = shape
        self.own = own
        self.dtype = dtype
        self.device = device
        self.narrow = narrow
        self._operations = operations
        self._layers = [self._products(self._layer()) for _ in range(own)]
        self._norm = torch.ones(shape.hidden, dtype=dtype, device=device)
        self._embeddings = self._weights(shape.vocabulary, shape.hidden)
        self._head = self._weights(shape.vocabulary, shape.hidden)

    @property
    def weight_bytes(self) -> int:
        """Of one weight of a layer."""
        return (self.dtype if self.narrow is None else self.narrow).itemsize

    def narrowed(self, dtype: torch.dtype, free: int) -> RandomDecoder:
        """One of the same shape beside this one, with as many weights of its own as there is memory for."""
        own = min(self.own, own_layers(self.shape, free, weight=dtype.itemsize))
        return RandomDecoder(self.shape, own, self._operations, self.device, self.dtype, dtype)

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        last: torch.Tensor,
        attention: AttentionBackend,
        stored: int,
    ) -> torch.Tensor:
        """The next tokens, [R] int32, behind the flat tokens `last`, [R] of tokens and positions, [T] int32.

        stored: how many layers the attention's pages have.
        """
        s, do = self.shape, self._operations
        total = self._embeddings[tokens]
        x = do.norm(total, self._norm)
        heads = (s.heads, s.kv_heads, s.kv_heads)
        for index in range(s.layers):
            layer = self._layers[index % len(self._layers)]
            q, k, v = layer.qkv(x).view(len(x), -1, s.head_dim).split(heads, dim=1)
            q, k = do.rotate(q, k, positions)
            attended = attention.run(index % stored, q, k, v).to(self.dtype)
            x = layer.out(attended.reshape(len(x), -1))
            total, x = do.add_norm(x, total, self._norm)
            x = layer.down(do.gate(layer.gate_up(x)))
            total, x = do.add_norm(x, total, self._norm)
        return F.linear(x[last], self._head).argmax(-1).int()

    def _layer(self) -> Layer:
        s = self.shape
        qkv = self._weights((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden)
        out = self._weights(s.hidden, s.heads * s.head_dim)
        return Layer(qkv, out, self._weights(2 * s.inner, s.hidden), self._weights(s.hidden, s.inner))

    def _products(self, layer: Layer) -> Products:
        return Products(*(self._product(weight) for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)))

    def _product(self, weight: torch.Tensor) -> Product:
        if self.narrow is None:
            return partial(F.linear, weight=weight)
        return narrow_linear(RowScaled.of(weight, self.narrow))

    def _weights(self, rows: int, columns: int) -> torch.Tensor:
        """Never zeros: a card is quicker with them than with numbers."""
        weights = torch.empty((rows, columns), dtype=self.dtype, device=self.device)
        return weights.normal_(std=columns**-0.5)


class Tables:
    """Page tables of rows that are all as long as they may get. Pages lie in no order, as after some hours of use.

    shared: tokens that all rows begin with, in full pages.
    """

    def __init__(self, rows: int, tokens: int, page_size: int, shared: int = 0) -> None:
        self.per_row, full = -(-tokens // page_size), shared // page_size
        self.num_pages = full + rows * (self.per_row - full)
        pages = np.random.default_rng(0).permutation(self.num_pages).astype(np.int32)
        own = pages[full:].reshape(rows, self.per_row - full)
        self._pages = np.hstack((np.tile(pages[:full], (rows, 1)), own))
        self._tokens = tokens

    def rows(self, spans: Sequence[tuple[int, int, int]]) -> list[AttentionRow]:
        """spans: row, first token, number of tokens."""
        return [AttentionRow(row, self._pages[row], start, count, self._tokens) for row, start, count in spans]


def flat(spans: Sequence[tuple[int, int, int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """positions [T] int32 of all tokens, and the flat index [R] int64 of each row's last one."""
    positions = np.concatenate([np.arange(start, start + count) for _, start, count in spans]).astype(np.int32)
    last = np.cumsum([count for *_, count in spans]) - 1
    return torch.from_numpy(positions).to(device), torch.from_numpy(last).to(device)
