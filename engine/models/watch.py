"""Who measures the parts of a step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class Watch(Protocol):
    def measure(self, part: str) -> AbstractContextManager[None]:
        """Around a part of a step: `qkv`, `heads`, `attention`, `out`, `gate_up`, `down` or `lm_head`."""
        ...
