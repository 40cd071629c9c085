"""Which attention backend is chosen, as a table of cases."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from engine.attention.choice import choose, installed
from engine.errors import AttentionUnavailable

CUDA, CPU, MPS = torch.device("cuda", 0), torch.device("cpu"), torch.device("mps")
BOTH = frozenset({"flashinfer", "flash_attn", "ninja", "nvcc"})
NONE: frozenset[str] = frozenset()


@pytest.mark.parametrize(
    ("wish", "device", "there", "head_dim", "dtype", "name", "reason"),
    [
        ("auto", CPU, BOTH, 64, torch.bfloat16, "native", "the quickest on a CPU"),
        ("auto", CPU, NONE, 64, torch.int8, "native", "the quickest on a CPU"),
        ("torch", CPU, NONE, 64, torch.float32, "torch-paged", "asked for"),
        ("auto", MPS, NONE, 64, torch.float16, "torch-paged", "the one for the device mps"),
        ("auto", CUDA, BOTH, 64, torch.bfloat16, "flashinfer", "the quickest on CUDA"),
        ("auto", CUDA, {"flash_attn"}, 64, torch.bfloat16, "torch-paged", "flashinfer is not installed"),
        ("auto", CUDA, {"flashinfer", "nvcc"}, 64, torch.bfloat16, "torch-paged", "finds no ninja"),
        (
            "auto",
            CUDA,
            {"flashinfer", "flashinfer_jit_cache"},
            64,
            torch.bfloat16,
            "flashinfer",
            "the quickest on CUDA",
        ),
        ("auto", CUDA, BOTH, 80, torch.bfloat16, "torch-paged", "heads of 80 elements, only for 64, 128, 256"),
        ("auto", CUDA, BOTH, 64, torch.float32, "torch-paged", "no kernels for torch.float32"),
        ("flashinfer", CUDA, BOTH, 256, torch.float16, "flashinfer", "asked for"),
        ("flash-attn", CUDA, BOTH, 80, torch.float16, "flash-attn", "asked for"),
        ("torch", CUDA, BOTH, 64, torch.float32, "torch-paged", "asked for"),
        ("auto", CUDA, BOTH, 128, torch.float8_e4m3fn, "flashinfer", "the quickest on CUDA"),
        ("auto", CUDA, NONE, 128, torch.float8_e4m3fn, "torch-paged", "flashinfer is not installed"),
    ],
)
def test_choices(
    wish: str,
    device: torch.device,
    there: frozenset[str],
    head_dim: int,
    dtype: torch.dtype,
    name: str,
    reason: str,
) -> None:
    choice = choose(wish, device, there, head_dim, dtype)
    assert choice.name == name
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("wish", "device", "there", "head_dim", "dtype", "reason"),
    [
        ("fastest", CUDA, BOTH, 64, torch.bfloat16, "one of auto, flashinfer, flash-attn, torch"),
        ("flashinfer", CPU, BOTH, 64, torch.bfloat16, "needs CUDA, and the device is cpu"),
        ("auto", CPU, BOTH, 64, torch.float16, "ask for another kv_dtype, int8, bfloat16 or float32"),
        ("flashinfer", CPU, BOTH, 64, torch.bfloat16, "the device is cpu: choose auto or torch"),
        ("flash-attn", MPS, BOTH, 64, torch.bfloat16, "needs CUDA, and the device is mps"),
        ("flashinfer", CUDA, {"flash_attn"}, 64, torch.bfloat16, "the package flashinfer is not installed"),
        ("flashinfer", CUDA, {"flashinfer"}, 64, torch.bfloat16, "finds no ninja and no nvcc"),
        ("flash-attn", CUDA, {"flashinfer"}, 64, torch.bfloat16, "the package flash_attn is not installed"),
        ("flashinfer", CUDA, BOTH, 96, torch.bfloat16, "heads of 96 elements"),
        ("flash-attn", CUDA, BOTH, 512, torch.bfloat16, "not 512"),
        ("flash-attn", CUDA, BOTH, 64, torch.float32, "no kernels for torch.float32"),
        ("auto", CUDA, BOTH, 64, torch.int8, "ask for another kv_dtype"),
        ("auto", CUDA, BOTH, 64, torch.float8_e5m2, "ask for another kv_dtype"),
        ("auto", CPU, NONE, 64, torch.float8_e4m3fn, "on a CPU: ask for another kv_dtype"),
        ("flash-attn", CUDA, BOTH, 64, torch.float8_e4m3fn, "no kernels for torch.float8_e4m3fn"),
    ],
)
def test_wishes_that_cannot_be(
    wish: str, device: torch.device, there: frozenset[str], head_dim: int, dtype: torch.dtype, reason: str
) -> None:
    with pytest.raises(AttentionUnavailable, match=reason):
        choose(wish, device, there, head_dim, dtype)


def test_what_is_installed_is_found_without_loading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    assert "flashinfer" in installed()
    assert "flashinfer" not in sys.modules


def test_compilers_are_found_where_flashinfer_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert not installed() & {"ninja", "nvcc"}
    for tool in (tmp_path / "ninja", tmp_path / "cuda" / "bin" / "nvcc"):
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.touch(mode=0o755)
    assert installed() >= {"ninja", "nvcc"}
