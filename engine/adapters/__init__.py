"""LoRA adapters: read from peft's folders, applied to the rows of a step that ask for them (arXiv 2106.09685)."""

from engine.adapters.adapter import Adapter, LowRank
from engine.adapters.batch import Adapters
from engine.adapters.load import load_adapter

__all__ = ["Adapter", "Adapters", "LowRank", "load_adapter"]
