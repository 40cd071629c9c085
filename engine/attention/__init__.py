"""Attention backends: they own the storage of keys and values and its layout; everybody else deals in page numbers."""

from engine.attention.base import AttentionBackend, AttentionRow, KVShape, LayerAttention
from engine.attention.cpu import CpuAttention

__all__ = ["AttentionBackend", "AttentionRow", "CpuAttention", "KVShape", "LayerAttention"]
