"""Attention through page tables as the kernels do it: whole pages, with a probability of zero for what is masked."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import torch

NOTHING = -5e4
"""The logarithm of no sum at all (math::inf in FlashInfer's math.cuh)."""


@dataclass(frozen=True)
class Scores:
    window_left: int
    soft_cap: float
    scale: float
    causal: bool = True


def attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    q_offsets: list[int],
    page_offsets: list[int],
    pages: list[int],
    last_page_len: list[int],
    options: Scores,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, Hq, D], kv [pages, 2, page_size, Hkv, D]; gives [T, Hq, D] float32, and the logarithms to base 2 of the
    sums of exponentials, [T, Hq]. What is behind the end of a sequence is multiplied by zero, so that it shows if it is
    not finite (FlashInfer reads zeros there for values)."""
    rows = []
    for row, last in enumerate(last_page_len):
        table = pages[page_offsets[row] : page_offsets[row + 1]]
        queries = q[q_offsets[row] : q_offsets[row + 1]].float()
        if not table:
            rows.append((torch.zeros_like(queries), torch.full(queries.shape[:2], NOTHING)))
        elif len(queries):
            length = (len(table) - 1) * kv.shape[2] + last
            keys, values = (kv[table, part].flatten(0, 1).float() for part in (0, 1))
            rows.append(attend_row(queries, keys, values, length, options))
    attended, log_sums = zip(*rows, strict=True)
    return torch.cat(attended), torch.cat(log_sums)


def attend_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int, options: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, Hq, D], the last tokens of the first `length` of k and v [S, Hkv, D] where they are causal; gives [T, Hq,
    D] and [T, Hq]. All float32."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->hts", q, k) * options.scale
    if options.soft_cap > 0:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    own, theirs = torch.arange(length - len(q), length)[:, None], torch.arange(len(k))
    hidden = theirs > own if options.causal else (theirs >= length).expand(len(q), -1)
    if options.window_left >= 0:
        hidden = hidden | (theirs < own - options.window_left)
    scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v), scores.logsumexp(-1).T / log(2)
