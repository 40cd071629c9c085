"""Contiguous working copies of the keys and values of running sequences, side by side: one product serves many.

Gathering a sequence from its pages in every layer of every step would cost more than attending to it. So each running
sequence has a place in a room: a block of places of one size, each a head-major copy of one sequence's keys and values.
One that outgrows its place moves to a room of larger places. Each room costs a product of its own, and places longer
than their sequences cost multiplying with what is behind them: so sequences share a room until that costs more than
another room would.

    room.kv  [layers, 2, places, kv_heads, size, head_dim]        2: keys, values

What is behind the end of a sequence may be anything finite: it is multiplied, by a probability of zero. The memory of a
place that is free stays with its room as long as another sequence is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import KVShape

_SMALLEST = 256
_SPARE_BYTES = 256 << 20
"""Of rooms that are kept although they are empty: fresh memory costs more than filling it, up to 1 ms for each MB."""
_PRODUCT_BYTES = 1 << 20
"""Another product in each layer takes about as long as multiplying with so many bytes of keys and values more."""


class Room:
    """Places of `size` tokens, at first one, then four times as many whenever they are all taken."""

    def __init__(self, shape: KVShape, dtype: torch.dtype, size: int) -> None:
        self.size = size
        self._shape = shape
        self._dtype = dtype
        self._copies: list[WorkingCopy | None] = [None]
        self.kv = self._zeros()

    @property
    def empty(self) -> bool:
        return not any(self._copies)

    def wasted(self, size: int) -> int:
        """Tokens behind the ends of sequences that would fit into places of `size`, one more of them included."""
        as_short = sum(copy is not None and copy.length <= size for copy in self._copies)
        return (as_short + 1) * (self.size - size)

    def take(self) -> WorkingCopy:
        """The first free place."""
        if None not in self._copies:
            self._grow()
        place = self._copies.index(None)
        self._copies[place] = copy = WorkingCopy(self, place)
        return copy

    def leave(self, copy: WorkingCopy) -> None:
        self._copies[copy.place] = None
        if copy.tainted:
            copy.kv[..., : copy.length, :] = 0

    def _grow(self) -> None:
        old = self.kv
        self._copies += [None] * (3 * len(self._copies))
        self.kv = self._zeros()
        for copy in filter(None, self._copies):
            self.kv[:, :, copy.place, :, : copy.length] = old[:, :, copy.place, :, : copy.length]

    def _zeros(self) -> torch.Tensor:
        """Zeros that take no memory yet: numpy leaves them to the system, torch would write them."""
        shape = self._shape
        sizes = (shape.num_layers, 2, len(self._copies), shape.num_kv_heads, self.size, shape.head_dim)
        return torch.from_numpy(np.zeros(sizes, dtype=f"i{self._dtype.itemsize}")).view(self._dtype)


@dataclass(slots=True, eq=False)
class WorkingCopy:
    """The place of one sequence. length: the tokens that it holds. tainted: some of them may not be finite."""

    room: Room
    place: int
    length: int = 0
    tainted: bool = False

    @property
    def kv(self) -> torch.Tensor:
        """[2, layers, kv_heads, size, head_dim], as pools have it; good until the next `reserve` or `make`."""
        return self.room.kv[:, :, self.place].transpose(0, 1)


class WorkingCopies:
    """The copies of all running sequences. dtype: of their elements."""

    def __init__(self, shape: KVShape, dtype: torch.dtype) -> None:
        self._shape = shape
        self._dtype = dtype
        self._rooms: dict[int, Room] = {}  # empty ones in the order in which they became so
        self._copies: dict[int, WorkingCopy] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._copies

    def __getitem__(self, sequence: int) -> WorkingCopy:
        return self._copies[sequence]

    def make(self, sequence: int, tokens: int) -> WorkingCopy:
        """An empty copy with room for so many tokens."""
        copy = self._copies[sequence] = self._room(tokens).take()
        return copy

    def reserve(self, sequence: int, tokens: int) -> WorkingCopy:
        """The copy of a sequence, with room for so many tokens: it moves if it must."""
        copy = self._copies[sequence]
        if tokens <= copy.room.size:
            return copy
        return self._move(sequence, copy, tokens)

    def fork(self, source: int, target: int, tokens: int) -> None:
        """`target`, a new sequence, holds the first `tokens` tokens of `source`."""
        original = self._copies[source]
        copy = self.make(target, max(tokens, 1))
        copy.kv[..., :tokens, :] = original.kv[..., :tokens, :]
        copy.length, copy.tainted = tokens, original.tainted

    def drop(self, sequence: int) -> None:
        """Unknown numbers are ignored."""
        if (copy := self._copies.pop(sequence, None)) is not None:
            self._leave(copy)

    def _move(self, sequence: int, copy: WorkingCopy, tokens: int) -> WorkingCopy:
        larger = self._copies[sequence] = self._room(tokens).take()
        larger.kv[..., : copy.length, :] = copy.kv[..., : copy.length, :]
        larger.length, larger.tainted = copy.length, copy.tainted
        self._leave(copy)
        return larger

    def _leave(self, copy: WorkingCopy) -> None:
        room = copy.room
        room.leave(copy)
        if room.empty:
            self._rooms[room.size] = self._rooms.pop(room.size)
            self._spare()

    def _spare(self) -> None:
        """Gives up the rooms that have been empty for longest, as far as all empty ones are more than is kept."""
        empty = [room for room in self._rooms.values() if room.empty]
        held = sum(room.kv.nbytes for room in empty)
        for room in empty:
            if held > _SPARE_BYTES:
                held -= room.kv.nbytes
                del self._rooms[room.size]

    def _room(self, tokens: int) -> Room:
        """The largest room in use that wastes less than a product of its own would cost; else one of the right size."""
        size, shape = next(size for size in _sizes() if size >= tokens), self._shape
        token_bytes = 2 * shape.num_kv_heads * shape.head_dim * self._dtype.itemsize
        for room in sorted(self._rooms.values(), key=lambda room: -room.size):
            fits = not room.empty and room.size >= size
            if fits and room.wasted(size) * token_bytes <= _PRODUCT_BYTES:
                return room
        if (own := self._rooms.get(size)) is None:
            own = self._rooms[size] = Room(self._shape, self._dtype, size)
        return own


def _sizes() -> Iterator[int]:
    """256, 384, 512, 768, 1024, ..."""
    size = _SMALLEST
    while True:
        yield size
        yield size + size // 2
        size *= 2
