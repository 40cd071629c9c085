"""Which attention backend serves a model on a device, and why."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Literal, get_args

import torch

from engine.attention import flash_attn, flashinfer, paged_kv
from engine.attention.kv_scales import FP8
from engine.config import AttentionWish
from engine.errors import AttentionUnavailable

Name = Literal["flashinfer", "flash-attn", "torch-paged", "native"]

_PACKAGES = ("flashinfer", "flashinfer_jit_cache", "flash_attn")
_TOOLS = ("ninja", "nvcc")


@dataclass(frozen=True, slots=True)
class Choice:
    """name: of the module in engine/attention. reason: one line for the log. decode: who serves steps of single tokens,
    where that is another one."""

    name: Name
    reason: str
    decode: Name | None = None

    def gathers(self, page_size: int) -> bool:
        """Whether keys and values of a step's sequences are copied in each layer."""
        return self.name == "torch-paged" or (self.name == "flash-attn" and not flash_attn.reads_pages(page_size))


def installed() -> frozenset[str]:
    """What there is for attention on CUDA: packages, which are not loaded, and what compiles FlashInfer's kernels."""
    packages = (package for package in _PACKAGES if find_spec(package) is not None)
    return frozenset((*packages, *(tool for tool in _TOOLS if _has(tool))))


def choose(wish: str, device: torch.device, there: Collection[str], head_dim: int, dtype: torch.dtype) -> Choice:
    """The backend for what was wished for; auto takes the quickest that can serve.

    there: what `installed` gives. dtype: of keys and values. Raises AttentionUnavailable if that cannot be.
    """
    if wish not in get_args(AttentionWish):
        raise AttentionUnavailable(f"there is no attention {wish!r}: it is one of {', '.join(get_args(AttentionWish))}")
    if device.type != "cuda":
        return _without_cuda(wish, device, dtype)
    if dtype not in paged_kv.DTYPES:
        raise AttentionUnavailable(f"keys and values cannot be kept in {dtype} on CUDA: ask for another kv_dtype")
    if wish == "torch":
        return Choice("torch-paged", "asked for")
    if wish == "flash-attn":
        _check(wish, _no_flash_attn(there, head_dim, dtype))
        serves = _no_flashinfer(there, head_dim, dtype) is None
        return Choice("flash-attn", "asked for", "flashinfer" if serves else "torch-paged")
    hindrance = _no_flashinfer(there, head_dim, dtype)
    if wish == "auto" and hindrance is not None:
        return Choice("torch-paged", hindrance)
    _check(wish, hindrance)
    return Choice("flashinfer", "asked for" if wish == "flashinfer" else "the quickest on CUDA")


def _without_cuda(wish: str, device: torch.device, dtype: torch.dtype) -> Choice:
    if wish in ("flashinfer", "flash-attn"):
        _check(wish, f"it needs CUDA, and the device is {device.type}: choose auto or torch")
    if device.type != "cpu":
        return Choice("torch-paged", f"the one for the device {device.type}")
    if wish == "torch":
        return Choice("torch-paged", "asked for")
    if dtype in (torch.float16, FP8):
        raise AttentionUnavailable(
            f"keys and values cannot be kept in {dtype} on a CPU: ask for another kv_dtype, int8, bfloat16 or float32"
        )
    return Choice("native", "the quickest on a CPU")


def _check(wish: str, hindrance: str | None) -> None:
    if hindrance is not None:
        raise AttentionUnavailable(f"attention {wish} was asked for: {hindrance}")


def has_flashinfer(there: Collection[str]) -> bool:
    """Whether FlashInfer's kernels can be used at all."""
    return _no_kernels(there) is None


def _no_flashinfer(there: Collection[str], head_dim: int, dtype: torch.dtype) -> str | None:
    """Why FlashInfer cannot serve; None: it can."""
    return _no_kernels(there) or flashinfer.unsupported(head_dim, dtype)


def _no_kernels(there: Collection[str]) -> str | None:
    """Why there are none of FlashInfer; None: there are. They are compiled when they are first used, or come along."""
    if "flashinfer" not in there:
        return "the package flashinfer is not installed"
    missing = [tool for tool in _TOOLS if tool not in there]
    if missing and "flashinfer_jit_cache" not in there:
        return f"FlashInfer has to compile its kernels, and finds no {' and no '.join(missing)}"
    return None


def _no_flash_attn(there: Collection[str], head_dim: int, dtype: torch.dtype) -> str | None:
    """Why flash-attn cannot serve; None: it can."""
    if "flash_attn" not in there:
        return "the package flash_attn is not installed"
    return flash_attn.unsupported(head_dim, dtype)


def _has(tool: str) -> bool:
    """Where FlashInfer looks: the path, and for CUDA's compiler CUDA's folder."""
    cuda = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return which(tool) is not None or (tool == "nvcc" and (Path(cuda) / "bin" / tool).is_file())
