"""Causal language models of transformers, run over our keys and values. Importing this loads transformers."""

from engine.models.hf.loading import load_hf
from engine.models.hf.model import HfModel

__all__ = ["HfModel", "load_hf"]
