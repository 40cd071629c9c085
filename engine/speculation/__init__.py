"""Speculative decoding: guess the next tokens cheaply, check them all in one step of the model, keep what is right."""

from engine.speculation.drafter import Ask, Drafter
from engine.speculation.ngram import NgramDrafter
from engine.speculation.speculator import Speculator
from engine.speculation.verify import verified

__all__ = ["Ask", "Drafter", "NgramDrafter", "Speculator", "verified"]
