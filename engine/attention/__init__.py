"""Attention backends: they own the storage of keys and values and its layout; everybody else deals in page numbers."""

from engine.attention.base import AttentionBackend, AttentionRow, KVShape, LayerAttention
from engine.attention.torch_bmm import TorchAttention

__all__ = ["AttentionBackend", "AttentionRow", "KVShape", "LayerAttention", "TorchAttention"]
