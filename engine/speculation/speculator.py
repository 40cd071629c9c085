"""Drafts for a step: who gets how many, from which drafter, within what the scheduler has left."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Ordered

from engine.scheduler import Scheduler, StepPlan, StepRow
from engine.sequence import Sequence
from engine.speculation.drafter import Ask, Drafter
from engine.speculation.pace import Pace

log = logging.getLogger(__name__)


class Speculator:
    """Adds drafts to the decode rows of plans. drafter None: never any.

    most: drafts in a step. The rows of a step and its drafts together are at most most + 1, so that a sequence alone
    may have all of them, two share one less, and with more than `most` sequences there are none: in larger batches the
    products no longer wait for weights, and drafts cost what they save. A step that computes a prompt has none either,
    nor has a sequence before its first token: drafts delay no prefill. They evict no page and preempt nobody.
    """

    def __init__(self, drafter: Drafter | None, most: int) -> None:
        self._drafter = drafter
        self._most = most
        self._paces: dict[int, Pace] = {}

    @property
    def drafts(self) -> bool:
        """Whether any step may have drafts."""
        return self._drafter is not None

    def extend(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """Puts rows with drafts in the place of rows without. A drafter that fails is given up: texts go on without."""
        room = min(plan.spare, self._most + 1 - len(plan.rows))
        if self._drafter is None or room < 1 or not all(map(_decodes, plan.rows)):
            return
        asks = {index: ask for index, row in enumerate(plan.rows) if (ask := self._ask(row.sequence, room)) is not None}
        if not asks:
            return
        try:
            proposed = self._drafter.propose(list(asks.values()))
        except Exception:
            log.exception("drafting failed: no more of it")
            self._drafter = None
            return
        for index, drafts in zip(asks, _share(proposed, room), strict=True):
            row = plan.rows[index]
            count = scheduler.reserve_ahead(row.sequence, len(drafts))
            plan.rows[index] = row.with_drafts(tuple(drafts[:count]))

    def went(self, sequence: Sequence, drafted: int, kept: int) -> None:
        """So many drafts of a sequence were in a step, and so many of them are its tokens now."""
        if drafted and sequence.number in self._paces:
            self._paces[sequence.number].went(drafted, kept, sequence.generated)

    def drop(self, number: int) -> None:
        """Forgets a sequence that has ended or lost its pages."""
        self._paces.pop(number, None)
        if self._drafter is not None:
            self._drafter.drop(number)

    def _ask(self, sequence: Sequence, room: int) -> Ask | None:
        pace = self._paces.get(sequence.number)
        if pace is None and self._drafter is not None:
            pace = self._paces[sequence.number] = Pace(self._most, self._drafter.cost)
        # The last token that fits is sampled, never computed: a draft in its place would serve nothing.
        fits = sequence.capacity - sequence.num_tokens - 1
        at_most = min(0 if pace is None else pace.wanted(sequence.generated), fits, room)
        if at_most < 1:
            return None
        return Ask(sequence.number, sequence.tokens[: sequence.num_tokens], at_most, sequence.capacity)


def _decodes(row: StepRow) -> bool:
    """Its token is the sequence's last, and was sampled: no part of a prompt, or of what is computed once more."""
    return row.samples and row.count == 1 and row.sequence.generated > 0


def _share(proposed: Ordered[list[int]], room: int) -> list[list[int]]:
    """The first `room` drafts of all: first ones before second ones, which are less likely to be right."""
    counts = [0] * len(proposed)
    for place in range(max(map(len, proposed))):
        for index, drafts in enumerate(proposed):
            if place < len(drafts) and room > 0:
                counts[index], room = place + 1, room - 1
    return [drafts[:count] for drafts, count in zip(proposed, counts, strict=True)]
