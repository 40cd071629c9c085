"""A whole step of sampling at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.sampling import NoCandidate, Sampled, Sampler, SamplingState


def sample(
    logits: torch.Tensor, states: Sequence[SamplingState], bytes_of: Callable[[int], bytes]
) -> list[Sampled | NoCandidate]:
    """The next token of each state, from its row of logits [S, vocab]."""
    sampler = Sampler(logits, bytes_of)
    return [sampler.choose(place, state) for place, state in zip(range(len(logits)), states, strict=True)]
