"""Choosing the next tokens of a step: what each request asked for, and nothing of its neighbours."""

from engine.sampling.grammar import GrammarCompiler, TokenMatcher
from engine.sampling.sampler import NoCandidate, Sampled, Sampler
from engine.sampling.state import SamplingState

__all__ = ["GrammarCompiler", "NoCandidate", "Sampled", "Sampler", "SamplingState", "TokenMatcher"]
