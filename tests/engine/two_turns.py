"""A workload of several conversations at once, each of two turns with two choices."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.api import TokenIds
from engine.local import LocalEngine
from tests.engine.test_choices import choose
from tests.engine.test_local_engine import prompt

CHOICES = 2


async def two_turns(
    engine: LocalEngine, histories: Sequence[TokenIds], kinds: Sequence[dict[str, Any]], **common: Any
) -> list[list[int]]:
    """The ids of all choices of both turns, in order. The second turn goes on from the second choice of the first.

    kinds: of sampling, taken in turn.
    """
    texts: list[list[int]] = []
    for turn in range(2):
        asked = [
            choose(engine, history, CHOICES, **common, **kinds[index % len(kinds)])
            for index, history in enumerate(histories)
        ]
        outputs = await asyncio.gather(*asked)
        texts += [output.ids[choice] for output in outputs for choice in range(CHOICES)]
        histories = [
            np.concatenate((history, np.asarray(output.ids[1], np.int32), prompt(9, seed=50 + turn)))
            for history, output in zip(histories, outputs, strict=True)
        ]
    return texts
