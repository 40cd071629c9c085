"""Which rows of a step attend in one product: those that compute equally many tokens and whose working copies stand in
one room, side by side.

    room     place 0    place 1    place 2    place 3    place 4
             1 token    1 token    (free)     1 token    64 tokens
             `------------- one group --------------'    `- one -'

A place between them whose sequence is not of the group is computed along with it, for nothing, as long as at least
half of the places do something.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import AttentionRow
from engine.attention.working import Room, WorkingCopy

_MOST_QUERIES = 128
"""Of one product: a longer chunk of a prompt is cut, so that its scores stay in the processor's caches and its first
tokens need not be multiplied with the keys of its last."""
_FEW_KEYS = 768
"""Up to here, torch's own attention is quicker for a single token."""
_MANY_QUERIES = 16
"""From here on, copying the keys costs less than multiplying with empty ones behind them."""


@dataclass(frozen=True, slots=True)
class RowPart:
    """Tokens start .. start + count - 1 of a sequence, which are the flat step's from `offset` on."""

    copy: WorkingCopy
    start: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class Group:
    """`count` tokens of each of the places first .. last - 1 of a room attend to its first `keys` tokens.

    tokens: those of the flat step, place by place; a free place has some token. kept: which of them are the group's
    own, None: all. own: these. alone: they are the whole step, in its order. end: behind the last key that any of them
    sees. single: one token of one sequence, behind a short past. stored: where their keys and values go in a layer of
    the room, seen as [-1, head_dim]: [2, own, kv_heads]. masks: added to the scores, one for each window, [places, 1,
    count, keys].
    """

    room: Room
    first: int
    last: int
    count: int
    keys: int
    tokens: slice | torch.Tensor
    kept: torch.Tensor | None
    own: slice | torch.Tensor
    alone: bool
    end: int
    single: bool
    stored: torch.Tensor
    masks: tuple[torch.Tensor, ...]


def group_rows(
    rows: Sequence[AttentionRow], copies: Sequence[WorkingCopy], windows: Sequence[int | None]
) -> list[Group]:
    """The groups of a step, in an order in which every key is stored before anything attends to it.

    copies: of the rows, each long enough for what the row computes. windows: see `LayerAttention`; a mask for each.
    """
    total = sum(row.count for row in rows)
    together: dict[tuple[int, int], list[RowPart]] = {}
    groups, offset = [], 0
    for row, copy in zip(rows, copies, strict=True):
        for start in range(0, row.count, _MOST_QUERIES):
            count = min(_MOST_QUERIES, row.count - start)
            part = RowPart(copy, row.start + start, count, offset + start)
            if count < _MANY_QUERIES:
                together.setdefault((copy.room.size, count), []).append(part)
            else:
                groups.append(_group([part], windows, total))
        offset += row.count
    for parts in together.values():
        groups += [_group(some, windows, total) for some in _side_by_side(parts)]
    return groups


def _side_by_side(parts: list[RowPart]) -> Iterator[list[RowPart]]:
    """Parts of one room: all at once if they are at least half of the places they span, else run by run."""
    parts.sort(key=lambda part: part.copy.place)
    places = np.array([part.copy.place for part in parts])
    if 2 * len(parts) > places[-1] - places[0]:
        yield parts
        return
    breaks = np.flatnonzero(np.diff(places) > 1) + 1
    for run in np.split(np.arange(len(parts)), breaks):
        yield [parts[index] for index in run]


def _group(parts: list[RowPart], windows: Sequence[int | None], total: int) -> Group:
    """parts: of one room and one count, by place. total: tokens of the step."""
    room, count = parts[0].copy.room, parts[0].count
    first, last = parts[0].copy.place, parts[-1].copy.place + 1
    end = max(part.start for part in parts) + count
    keys = end if count >= _MANY_QUERIES and end < 0.9 * room.size else room.size
    mine = np.array([part.copy.place for part in parts]) - first
    starts, offsets = np.zeros(last - first, np.int64), np.zeros(last - first, np.int64)
    starts[mine] = [part.start for part in parts]
    offsets[mine] = [part.offset for part in parts]
    positions = starts[:, None] + np.arange(count)
    tokens = offsets[:, None] + np.arange(count)
    own, kept = _as_slice(tokens[mine].ravel()), None
    if len(parts) < last - first:
        kept = torch.from_numpy((mine[:, None] * count + np.arange(count)).ravel())
    return Group(
        room,
        first,
        last,
        count,
        keys,
        own if kept is None else torch.from_numpy(tokens.ravel()),
        kept,
        own,
        own == slice(0, total),
        end,
        len(parts) == count == 1 and end <= _FEW_KEYS,
        _slots(room, mine + first, positions[mine]),
        tuple(_mask(positions, keys, window, room.kv.dtype) for window in windows),
    )


def _as_slice(tokens: np.ndarray) -> slice | torch.Tensor:
    """Adjacent tokens as a slice, which copies nothing."""
    if len(tokens) == 1 or np.all(np.diff(tokens) == 1):
        return slice(int(tokens[0]), int(tokens[-1]) + 1)
    return torch.from_numpy(tokens)


def _slots(room: Room, places: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    """See `Group.stored`. places: [P], positions: [P, count]."""
    _, two, in_all, heads, size, _ = room.kv.shape
    base = (np.arange(two)[:, None] * in_all + places) * heads
    rows = base[:, :, None, None] + np.arange(heads)
    return torch.from_numpy((rows * size + positions[None, :, :, None]).reshape(two, -1, heads))


def _mask(positions: np.ndarray, keys: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """0 where a token at a position, [places, count], sees a key, else minus infinity: [places, 1, count, keys]."""
    own, theirs = torch.from_numpy(positions)[:, None, :, None], torch.arange(keys)
    hidden = theirs > own
    if window is not None:
        hidden |= theirs <= own - window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
