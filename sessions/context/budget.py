"""How many tokens a prompt may have."""

from __future__ import annotations

from dataclasses import dataclass

from engine.api import EngineInfo, SamplingParams

RESERVE_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class Budget:
    """limit: what the engine holds for one request; reserve: the part kept for the answer. Both in tokens."""

    limit: int
    reserve: int

    @classmethod
    def of(cls, info: EngineInfo, params: SamplingParams) -> Budget:
        """The reserve is max_tokens where that is given, else a quarter of the limit, 1024 at most."""
        limit = min(info.context_length, info.pool_tokens)
        return cls(limit, min(RESERVE_LIMIT, limit // 4) if params.max_tokens is None else params.max_tokens)

    @property
    def tokens(self) -> int:
        """What is left for the prompt; negative when the reserve alone exceeds the limit."""
        return self.limit - self.reserve
