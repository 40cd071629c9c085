"""How torch's threads wait for one another. Import this before torch, which reads the setting when it is loaded."""

from __future__ import annotations

import os

SPIN_COUNT = 6000


def spin_briefly() -> None:
    """Lets a waiting thread spin for some microseconds before it sleeps; a value set by the user wins.

    A step has hundreds of short parallel regions. By default a thread spins for milliseconds at the end of each; as
    soon as any other process wants the core, every region then waits for the scheduler, and a token that takes 20 ms
    takes seconds. How brief is a trade between idle and shared cores (docs/performance.md). Has no effect once torch is
    loaded.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
