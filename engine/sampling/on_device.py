"""Choosing tokens where the logits are, so that these need not come to the host, and the next step need not wait.

Only what follows from the logits alone (`Draw`) is chosen here, by the definitions of draw.py: in float64, and with the
request's own random numbers. Kernels that draw noise themselves take it by the row's place in the batch, so that a seed
would mean another text beside other neighbours.

    greedy                  the first largest logit
    temperature alone       inverse CDF over the whole row
    top_k                   the same over the k most likely tokens
    top_p, min_p            over a short list of the most likely ones; where it may lack some of those that the filters
                            leave, the host has to look at the row

Sums are made in another order than on the host: where a random number lies within some 1e-13 of the border between two
tokens, the other one may be taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.draw import SHORTLIST, Draw
from engine.sampling.most_likely import MostLikely

Ints: TypeAlias = npt.NDArray[np.int32]

_AT_ONCE = 1 << 22
"""Elements that are worked on at a time: 32 MB in float64."""

_NUMBERS = 5


class Verdict(IntEnum):
    """On a chosen token. NOT_FINITE: its row has no finite maximum. LOOK: the host has to look at the row."""

    SURE = 0
    NOT_FINITE = 1
    LOOK = 2


@dataclass(frozen=True, slots=True)
class Chosen:
    """For P rows of logits, on their device. tokens: int64 [P], some id of the vocabulary in any case. verdicts: int32
    [P]. rows: by its place, the logits [vocab] of each row about which the verdict may be LOOK, as copies."""

    tokens: torch.Tensor
    verdicts: torch.Tensor
    rows: dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class DrawTables:
    """What is to be sent along for P rows.

    whole, limited, open: the places of rows that are drawn from all their tokens, from their top_k, and by top_p or
    min_p alone; the rest is greedy. numbers: of these rows in that order, float64 [5, rows] as int32: temperature,
    uniform, top_k, top_p, min_p. most: the largest top_k.
    """

    whole: Ints
    limited: Ints
    open: Ints
    numbers: Ints
    most: int

    @classmethod
    def build(cls, draws: Sequence[Draw]) -> DrawTables:
        whole: list[int] = []
        limited: list[int] = []
        open: list[int] = []
        for place, draw in enumerate(draws):
            if draw.uniform is not None:
                p = draw.params
                (limited if p.top_k else open if p.top_p < 1.0 or p.min_p > 0.0 else whole).append(place)
        drawn = [draws[place] for place in (*whole, *limited, *open)]
        numbers = np.array(
            [(d.params.temperature, d.uniform, d.params.top_k, d.params.top_p, d.params.min_p) for d in drawn],
            dtype=np.float64,
        )
        return cls(
            np.array(whole, dtype=np.int32),
            np.array(limited, dtype=np.int32),
            np.array(open, dtype=np.int32),
            np.ascontiguousarray(numbers.reshape(-1, _NUMBERS).T).ravel().view(np.int32),
            max((draws[place].params.top_k for place in limited), default=0),
        )

    @property
    def arrays(self) -> list[Ints]:
        return [self.whole, self.limited, self.open, self.numbers]


class DeviceChooser:
    """Launches kernels and waits for none of them. most_likely: for the device of the logits."""

    def __init__(self, most_likely: MostLikely) -> None:
        self._most_likely = most_likely

    def choose(self, logits: torch.Tensor, tables: DrawTables, arrays: Sequence[torch.Tensor]) -> Chosen:
        """logits: float32 [P, vocab], which stay as they are. arrays: those of `tables`, on the device of these."""
        top, tokens = logits.max(dim=-1, keepdim=True)  # the first among equals; a NaN where there is one
        step = _Step(logits, top, tokens, (~top.isfinite()).int(), {})  # 1 is NOT_FINITE
        whole, limited, open, flat = arrays
        numbers = flat.view(torch.float64).view(_NUMBERS, len(whole) + len(limited) + len(open), 1)
        ends = np.cumsum([len(whole), len(limited), len(open)]).tolist()
        for span in _spans(0, ends[0], logits.shape[1]):
            self._draw_from_all(step, whole[span].long(), _Numbers(*numbers[:, span]))
        for span in _spans(ends[0], ends[1], logits.shape[1]):
            self._draw_from_top_k(
                step, limited[_shifted(span, ends[0])].long(), _Numbers(*numbers[:, span]), tables.most
            )
        for span in _spans(ends[1], ends[2], logits.shape[1]):
            own = _shifted(span, ends[1])
            copies = self._draw_from_nucleus(step, open[own].long(), _Numbers(*numbers[:, span]))
            step.rows.update(zip(tables.open[own].tolist(), copies, strict=True))
        return Chosen(tokens[:, 0], step.verdicts[:, 0], step.rows)

    def _draw_from_all(self, step: _Step, places: torch.Tensor, numbers: _Numbers) -> None:
        weights = _weights(step.logits[places], step.top[places], numbers)
        step.tokens.index_copy_(0, places, _invert(weights, numbers))

    def _draw_from_top_k(self, step: _Step, places: torch.Tensor, numbers: _Numbers, most: int) -> None:
        ids, values = self._by_likelihood(step.logits[places], most)
        weights = _weights(values, step.top[places], numbers)
        weights = torch.where(_counting(weights) < numbers.top_k, weights, 0.0)
        step.tokens.index_copy_(0, places, _from_list(ids, weights, weights.sum(-1, keepdim=True), numbers))

    def _draw_from_nucleus(self, step: _Step, places: torch.Tensor, numbers: _Numbers) -> torch.Tensor:
        """Gives the rows' logits."""
        logits, top = step.logits[places], step.top[places]
        ids, values = self._by_likelihood(logits, SHORTLIST)
        weights = _weights(values, top, numbers)
        total = _weights(logits, top, numbers).sum(-1, keepdim=True)
        reaches = (numbers.top_p < 1.0) & (weights.cumsum(-1)[:, -1:] >= numbers.top_p * total)
        enough = reaches | (weights[:, -1:] < numbers.min_p) | (weights.shape[1] == logits.shape[1])
        verdicts = step.verdicts[places]
        step.verdicts.index_copy_(0, places, torch.where(enough | (verdicts > 0), verdicts, int(Verdict.LOOK)))
        step.tokens.index_copy_(0, places, _from_list(ids, weights, total, numbers))
        return logits

    def _by_likelihood(self, logits: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and logits of the most likely tokens of each row, the first among equals first."""
        values, ids = self._most_likely(logits, min(most, logits.shape[1]))
        ids, order = ids.sort(dim=-1)
        values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        return ids.gather(-1, order), values


@dataclass(frozen=True, slots=True)
class _Step:
    """logits [P, vocab]; top, tokens, verdicts [P, 1], the last two being written. rows: see Chosen."""

    logits: torch.Tensor
    top: torch.Tensor
    tokens: torch.Tensor
    verdicts: torch.Tensor
    rows: dict[int, torch.Tensor]


class _Numbers(NamedTuple):
    """Of R rows, float64 [R, 1] each."""

    temperature: torch.Tensor
    uniform: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


def _weights(values: torch.Tensor, top: torch.Tensor, numbers: _Numbers) -> torch.Tensor:
    """[R, N] float64, 1 for the best token of a row: the softmax but for its denominator."""
    return values.double().sub_(top).div_(numbers.temperature).exp_()


def _from_list(ids: torch.Tensor, weights: torch.Tensor, total: torch.Tensor, numbers: _Numbers) -> torch.Tensor:
    """Ids [R, 1] drawn from what top_p and min_p leave of ids and weights, [R, N] by falling weight. total: what the
    weights top_p is a share of come to, [R, 1]."""
    wanted = torch.where(numbers.top_p < 1.0, numbers.top_p * total, torch.inf)
    size = (weights.cumsum(-1) < wanted).sum(-1, keepdim=True) + 1
    left = (_counting(weights) < size) & (weights >= numbers.min_p)
    ids, order = ids.sort(dim=-1)
    return ids.gather(-1, _invert(torch.where(left, weights, 0.0).gather(-1, order), numbers))


def _invert(weights: torch.Tensor, numbers: _Numbers) -> torch.Tensor:
    """[R, 1]: the place at which the cumulative sum of a row passes uniform * total."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum(numbers.uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    places = torch.searchsorted(cumulative, target.contiguous(), right=True)
    return places.clamp_max_(weights.shape[1] - 1)  # where a weight is NaN


def _counting(weights: torch.Tensor) -> torch.Tensor:
    return torch.arange(weights.shape[1], device=weights.device)


def _spans(start: int, end: int, columns: int) -> Iterator[slice]:
    step = max(1, _AT_ONCE // columns)
    return (slice(at, min(at + step, end)) for at in range(start, end, step))


def _shifted(span: slice, by: int) -> slice:
    return slice(span.start - by, span.stop - by)
