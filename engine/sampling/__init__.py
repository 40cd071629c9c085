"""Choosing the next tokens of a step: what each request asked for, and nothing of its neighbours."""

from engine.sampling.draw import Draw
from engine.sampling.grammar import GrammarCompiler, TokenMatcher
from engine.sampling.on_device import Chosen, DeviceChooser, DrawTables, Verdict
from engine.sampling.sampler import BAD_LOGITS, NoCandidate, Sampled, Sampler
from engine.sampling.state import SamplingState

__all__ = [
    "BAD_LOGITS",
    "Chosen",
    "DeviceChooser",
    "Draw",
    "DrawTables",
    "GrammarCompiler",
    "NoCandidate",
    "Sampled",
    "Sampler",
    "SamplingState",
    "TokenMatcher",
    "Verdict",
]
