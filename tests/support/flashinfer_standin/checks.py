"""What an argument has to be like; each raises AssertionError with its name."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from tests.support.flashinfer_standin.stream import Stream


@dataclass(frozen=True)
class Rules:
    """Which dtypes and head sizes have kernels. Tests of exact numbers let float32 through."""

    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, ...]


def integers(
    name: str, tensor: torch.Tensor, stream: Stream, *, on_host: bool, size: int | None = None, writable: bool = False
) -> None:
    """A flat, contiguous int32 array in the memory where it belongs."""
    assert isinstance(tensor, torch.Tensor), f"{name} is no tensor"
    assert tensor.dtype == torch.int32, f"{name} has the dtype {tensor.dtype}, kernels read int32"
    assert tensor.dim() == 1, f"{name} has {tensor.dim()} dimensions"
    assert tensor.is_contiguous(), f"{name} is not contiguous"
    assert stream.is_pinned(tensor) == on_host, f"{name} is {'not ' if on_host else ''}in host memory"
    if size is not None:
        assert len(tensor) == size, f"{name} has {len(tensor)} elements, not {size}"


def offsets(name: str, tensor: torch.Tensor, *, empty: bool = False) -> None:
    """empty: rows may be."""
    values = tensor.tolist()
    assert values[0] == 0, f"{name} begins with {values[0]}"
    assert all(a < b or (a == b and empty) for a, b in pairwise(values)), f"{name} has an empty row or falls: {values}"


def in_range(name: str, tensor: torch.Tensor, first: int, last: int) -> None:
    low, high = int(tensor.min()), int(tensor.max())
    assert first <= low, f"{name} has {low}, below {first}"
    assert high <= last, f"{name} has {high}, above {last}"


def floats(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, stream: Stream) -> None:
    assert tuple(tensor.shape) == shape, f"{name} has the shape {tuple(tensor.shape)}, not {shape}"
    assert tensor.dtype == dtype, f"{name} has the dtype {tensor.dtype}, not {dtype}"
    assert tensor.stride(-1) == 1, f"{name} is not contiguous in its last dimension"
    assert not stream.is_pinned(tensor), f"{name} is in host memory"


def workspace(tensor: torch.Tensor, stream: Stream) -> None:
    assert tensor.dtype == torch.uint8, f"the workspace has the dtype {tensor.dtype}"
    assert tensor.dim() == 1
    assert not stream.is_pinned(tensor), "the workspace is in host memory"
    assert not bool(tensor.any()), "the workspace is not zero at first"


def heads(num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, rules: Rules) -> None:
    sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
    assert all(type(size) is int and size > 0 for size in sizes), f"sizes {sizes}"
    assert num_qo_heads % num_kv_heads == 0, f"{num_qo_heads} query heads for {num_kv_heads}"
    assert head_dim in rules.head_dims, f"no kernels for heads of {head_dim}"


def dtypes(q: Any, kv: Any, rules: Rules) -> None:
    """Keys and values are kept as queries come, or in 8-bit floats."""
    assert isinstance(q, torch.dtype), f"q_data_type was left to its default, {q!r}"
    assert isinstance(kv, torch.dtype), f"kv_data_type was left to its default, {kv!r}"
    assert q in rules.dtypes, f"no kernels for {q}"
    assert kv in (q, torch.float8_e4m3fn), f"no kernels for queries in {q} and keys in {kv}"


def scores(window_left: int, logits_soft_cap: float | None, sm_scale: float | None) -> None:
    assert type(window_left) is int, f"window_left {window_left!r}"
    assert window_left >= -1
    assert isinstance(logits_soft_cap, float), f"logits_soft_cap {logits_soft_cap!r}"
    assert logits_soft_cap >= 0
    assert isinstance(sm_scale, float), f"sm_scale {sm_scale!r}"
    assert sm_scale > 0


def kv_scales(k_scale: Any, v_scale: Any, kv: torch.dtype) -> None:
    """Given as numbers beside 8-bit floats, and only there."""
    if kv != torch.float8_e4m3fn:
        assert (k_scale, v_scale) == (None, None), f"scales {k_scale!r}, {v_scale!r} for {kv}"
        return
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        assert isinstance(scale, float), f"{name} {scale!r} for keys and values in 8 bits"
        assert scale > 0


def defaults(**given: tuple[Any, Any]) -> None:
    """Options that the stand-in does not know must be left alone: name=(value, default)."""
    for name, (value, default) in given.items():
        assert value == default, f"the stand-in does not know {name}={value!r}"
