"""Sixteen vectors of sixteen lanes, turned over or added up, in steps that a processor takes in one cycle each.

That is: lanes move within a quarter of a vector (128 bits), or whole quarters do. Anything else takes several cycles.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.kernels.simd import Value

_LANES = 16
_LOW = tuple(lane for quarter in range(0, 16, 4) for lane in (quarter, quarter + 16, quarter + 1, quarter + 17))
_HIGH = tuple(lane + 2 for lane in _LOW)
_LOW_PAIRS = tuple(lane for q in range(0, 16, 4) for lane in (q, q + 1, q + 16, q + 17))
_HIGH_PAIRS = tuple(lane + 2 for lane in _LOW_PAIRS)
_EVEN_QUARTERS = tuple(quarter * 4 + lane for quarter in (0, 2, 4, 6) for lane in range(4))
_ODD_QUARTERS = tuple(lane + 4 for lane in _EVEN_QUARTERS)
_STEPS = ((_LOW, _HIGH), (_LOW_PAIRS, _HIGH_PAIRS), (_EVEN_QUARTERS, _ODD_QUARTERS), (_EVEN_QUARTERS, _ODD_QUARTERS))


class LaneSums:
    """Takes sixteen vectors, one after the other, and gives one whose lane i is the sum of the lanes of vector i.

    Vectors are added as soon as two have come equally far, so that few wait in registers.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Value]] = []
        self._sums: list[Value] = []

    def add(self, vector: Value) -> None:
        if vector.lanes != _LANES:
            self._sums.append(vector.sum())
            return
        step = 0
        while self._waiting and self._waiting[-1][0] == step:
            earlier = self._waiting.pop()[1]
            low, high = _STEPS[step]
            vector = earlier.shuffle(low, vector) + earlier.shuffle(high, vector)
            step += 1
        self._waiting.append((step, vector))

    def get(self) -> Value:
        return self._waiting[0][1] if self._waiting else gathered(self._sums)


def gathered(numbers: Sequence[Value]) -> Value:
    """The vector of these numbers."""
    vector = numbers[0].splat(len(numbers))
    for lane, number in enumerate(numbers):
        vector = vector.with_lane(lane, number)
    return vector


def transposed(rows: Sequence[Value]) -> list[Value]:
    """Sixteen vectors of n lanes to n vectors of sixteen."""
    lanes = rows[0].lanes
    if lanes != _LANES:
        return [gathered([row.lane(lane) for row in rows]) for lane in range(lanes)]
    quads = []
    for first in range(0, _LANES, 4):
        a, b, c, d = rows[first : first + 4]
        low, high = (a.shuffle(_LOW, b), c.shuffle(_LOW, d)), (a.shuffle(_HIGH, b), c.shuffle(_HIGH, d))
        quads.append([one.shuffle(pairs, other) for one, other in (low, high) for pairs in (_LOW_PAIRS, _HIGH_PAIRS)])
    columns: dict[int, Value] = {}
    for within, (a, b, c, d) in enumerate(zip(*quads, strict=True)):
        for odd, quarters in enumerate((_EVEN_QUARTERS, _ODD_QUARTERS)):
            first, second = a.shuffle(quarters, b), c.shuffle(quarters, d)
            columns[4 * odd + within] = first.shuffle(_EVEN_QUARTERS, second)
            columns[8 + 4 * odd + within] = first.shuffle(_ODD_QUARTERS, second)
    return [columns[column] for column in range(lanes)]
