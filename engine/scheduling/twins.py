"""Two requests that begin alike: the second waits until the first has computed what they share.

first    |<-- computed -->|..............|      running, in prefill
second   |<-- cached -->|                        waiting
                        |<-- saved -->|          at least a page
shared   |<-------------------------->|
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Hold:
    """Wait until `first` has computed `goal` tokens; no longer than it is running, in prefill, and moving."""

    first: Sequence
    goal: int

    def lasts(self, moving: Iterable[Sequence]) -> bool:
        """`moving`: who is computed in this step or was in the one before."""
        first = self.first
        return first.lease is not None and first.pending > 1 and first.computed < self.goal and first in moving


def find_hold(sequence: Sequence, cached: int, prefills: Iterable[Sequence], page_size: int) -> Hold | None:
    """The prefill that will give `sequence` at least a page more than the `cached` tokens it would find now.

    An interactive request waits for no background one. Most pairs cost the comparison of one page.
    """
    best: Hold | None = None
    end = sequence.num_tokens - 1
    wanted = sequence.tokens[cached : cached + page_size]
    for first in prefills:
        if first.cache_namespace != sequence.cache_namespace or not first.request.use_cache:
            continue
        longest = min(end, first.num_tokens)
        if (first.background and not sequence.background) or longest < cached + page_size:
            continue
        if not np.array_equal(wanted, first.tokens[cached : cached + page_size]):
            continue
        differs = sequence.tokens[:longest] != first.tokens[:longest]
        at = int(differs.argmax())
        shared = at if differs[at] else longest
        goal = shared - shared % page_size
        if goal >= cached + page_size and first.computed < goal and (best is None or goal > best.goal):
            best = Hold(first, goal)
    return best
