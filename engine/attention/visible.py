"""Which keys the tokens of a row may see: all that are not later, or the last ones of a window."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.base import AttentionRow


@dataclass(frozen=True, slots=True)
class Visible:
    """first: no token of the row sees a key before this one. mask: added to the scores, [count, start + count - first];
    None where nothing after `first` is hidden but by causality alone (a single token, or a row without a past).

        keys     0 ....... first .............. start ........ start + count
        token i            first + i <= seen .. start + i                      (full windows)
    """

    first: int
    mask: torch.Tensor | None


def visible(row: AttentionRow, window: int | None, dtype: torch.dtype, *, explicit: bool) -> Visible:
    """`window` keys, its own included, for each token; None: no limit. explicit: a mask even where causality is all."""
    end = row.start + row.count
    if window is None or end <= window:
        first = 0
        plain = row.start == 0 and not explicit
    else:
        first = max(0, row.start + 1 - window)
        plain = False
    if row.count == 1 or plain:
        return Visible(first, None)
    mask = torch.full((row.count, end - first), float("-inf"), dtype=dtype).triu_(row.start - first + 1)
    if window is not None and end > window:
        # Token i sits at start + i and sees the keys after start + i - window.
        mask += torch.full_like(mask, float("-inf")).tril_(row.start - first - window)
    return Visible(first, mask)
