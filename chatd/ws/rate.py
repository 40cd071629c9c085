"""How often something may happen."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """`burst` at once, then `per_s` every second."""

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = float(burst)
        self._clock = clock
        self._left = float(burst)
        self._seen = clock()

    def take(self) -> bool:
        """True if one more is allowed now."""
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._seen) * self._per_s)
        self._seen = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
