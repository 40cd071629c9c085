"""Steps of the random decoder as an engine makes them: prompts in chunks, then a token for each row."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from engine.attention.base import AttentionBackend, KVShape
from engine.attention.fixed_decode import FixedDecode
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.kv_scales import FP8
from engine.attention.paged_kv import PagedKV
from engine.attention.torch_paged import TorchPagedAttention
from engine.link import Arrival, link_to
from tests.gpu.checks import BackendName
from tests.gpu.costs import stored_layers
from tests.gpu.decoder import RandomDecoder, Tables, flat
from tests.gpu.device import Device, Work

PAGE_SIZE = 16


class Stepper:
    """rows sequences of up to `tokens` tokens each. kv: the dtype of keys and values. shared: tokens that all rows
    begin with. least_saved: as for FlashInferAttention.

    Raises MemoryError where not even one layer's pages fit.
    """

    def __init__(
        self,
        device: Device,
        model: RandomDecoder,
        backend: BackendName,
        rows: int,
        tokens: int,
        kv: torch.dtype | None = None,
        shared: int = 0,
        least_saved: int | None = None,
    ) -> None:
        shape, kept = model.shape, kv if kv is not None else model.dtype
        self.tables = Tables(rows, tokens, PAGE_SIZE, shared)
        held = self.tables.num_pages * PAGE_SIZE
        self.stored = stored_layers(shape, device.free_bytes(), held, kept.itemsize)
        if self.stored == 0:
            raise MemoryError(f"keys and values of {held} tokens do not fit, not even of one layer")
        self.rows = rows
        self._device = device
        self._model = model
        self._link = link_to(device.torch)
        pages = KVShape(self.stored, shape.kv_heads, shape.head_dim, self.tables.num_pages, PAGE_SIZE, kept)
        self._kv = PagedKV(pages, device.torch)
        _fill(self._kv)
        self.attention = self._backend(backend, least_saved)
        self._tokens = torch.ones(rows, dtype=torch.int32, device=device.torch)
        self._positions = torch.zeros(rows, dtype=torch.int32, device=device.torch)
        self._last = torch.arange(rows, device=device.torch)

    @property
    def shared(self) -> str:
        """What layers had to share for want of memory."""
        layers, notes = self._model.shape.layers, []
        if self._model.own < layers:
            notes.append(f"weights of {self._model.own} layers for {layers}")
        if self.stored < layers:
            notes.append(f"pages of {self.stored} layers for {layers}")
        return ", ".join(notes)

    def prefill(self, spans: Sequence[tuple[int, int, int]]) -> Callable[[], torch.Tensor]:
        """spans: row, first token, number of tokens. Planned; the result runs it and gives the rows' next tokens."""
        self.attention.plan(self.tables.rows(spans))
        positions, last = flat(spans, self._device.torch)
        tokens = torch.arange(len(positions), dtype=torch.int32, device=self._device.torch) % 1000
        return lambda: self._model.forward(tokens, positions, last, self.attention, self.stored)

    def begin_decode(self, context: int) -> None:
        """The next step computes the token at context - 1 of every row."""
        self._positions.fill_(context - 1)

    def plan_decode(self, context: int) -> None:
        self.attention.plan(self.tables.rows([(row, context - 1, 1) for row in range(self.rows)]))

    def decode(self) -> None:
        """A step as planned; its tokens are what the next one computes."""
        self._tokens.copy_(self._model.forward(self._tokens, self._positions, self._last, self.attention, self.stored))
        self._positions.add_(1)

    def decode_ahead(self, work: Work, contexts: Iterable[int], ahead: int) -> None:
        """Steps planned, run by `work`, and their tokens read. ahead: how many are launched before those of one are."""
        arrivals = deque[Arrival]()
        for context in contexts:
            self.plan_decode(context)
            work()
            arrivals.append(self.fetch_tokens())
            if len(arrivals) > ahead:
                arrivals.popleft().wait()
        for arrival in arrivals:
            arrival.wait()

    def capture_decode(self, context: int) -> Work:
        """`decode` without its host side, for steps planned by `plan_decode`."""
        self.begin_decode(context)
        self.plan_decode(context)
        replay = self._device.capture(self.decode)
        self.begin_decode(context)
        return replay

    def fetch_tokens(self) -> Arrival:
        """Of the last step; good until the second fetch after."""
        return self._link.fetch([self._tokens])

    def _backend(self, name: BackendName, least_saved: int | None) -> AttentionBackend:
        if name == "torch-paged":
            return TorchPagedAttention.quickest(self._kv, None)
        fixed = FixedDecode(batches=(self.rows,), most_pages=self.rows * self.tables.per_row)
        return FlashInferAttention(self._kv, None, self._model.shape.heads, fixed, least_saved)


def _fill(kv: PagedKV) -> None:
    """With numbers: reading zeros takes less."""
    for layer in range(kv.shape.num_layers):
        pages = kv.layer(layer)
        if kv.shape.dtype == FP8:
            pages.view(torch.uint8).random_(0, 0x70)
        else:
            pages.normal_()
