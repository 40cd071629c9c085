"""Attention backends: they own the storage of keys and values and its layout; everybody else deals in page numbers."""

from typing import TYPE_CHECKING, Any

from engine.attention.base import AttentionBackend, AttentionRow, KVShape, LayerAttention
from engine.attention.choice import Choice

if TYPE_CHECKING:
    from engine.attention.build import build_attention
    from engine.attention.cpu import CpuAttention

__all__ = ["AttentionBackend", "AttentionRow", "Choice", "CpuAttention", "KVShape", "LayerAttention", "build_attention"]


def __getattr__(name: str) -> Any:
    """The CPU's backend is loaded when it is first asked for: it brings a compiler, which other devices do without."""
    if name == "CpuAttention":
        from engine.attention.cpu import CpuAttention

        return CpuAttention
    if name == "build_attention":
        from engine.attention.build import build_attention

        return build_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
