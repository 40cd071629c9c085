"""What a decoder computes between its products: the same on every device."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import Heads, Norm
from engine.models.elementwise import CpuElementwise, Elementwise, TorchElementwise, TorchHeads, TorchNorm
from engine.models.fused import FlashInferElementwise
from tests.support import flashinfer_standin

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, QUERIES, KEYS, SIZE = 7, 6, 2, 16


def numbers(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["torch", "flashinfer"])
def other(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Elementwise:
    if request.param == "torch":
        return TorchElementwise()
    flashinfer_standin.install(monkeypatch)
    return FlashInferElementwise(torch.float32)


def test_norms(other: Elementwise) -> None:
    weight, x = numbers(64), numbers(ROWS, 64, seed=1)
    torch.testing.assert_close(other.norm(weight, 1e-5)(x), CpuElementwise().norm(weight, 1e-5)(x))


@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_heads(other: Elementwise, rotary: bool, normed: bool) -> None:
    angles = numbers(100, SIZE // 2, seed=2)
    table = torch.stack((angles.cos(), angles.sin()), dim=-1) if rotary else None
    norms = [Norm(numbers(SIZE, seed=seed), 1e-5) if normed else None for seed in (3, 4)]
    heads = Heads(QUERIES, KEYS, table, *norms)
    qkv, positions = numbers(ROWS, (QUERIES + 2 * KEYS) * SIZE, seed=5), torch.tensor([0, 99, 3, 3, 50, 1, 2])
    wanted = CpuElementwise().heads(heads)(qkv.clone(), positions)
    found = other.heads(heads)(qkv.clone(), positions)
    for ours, theirs, count in zip(found, wanted, (QUERIES, KEYS, KEYS), strict=True):
        assert ours.shape == (ROWS, count, SIZE)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_gates(other: Elementwise) -> None:
    x = numbers(ROWS, 2 * 24)
    torch.testing.assert_close(other.gate(x), CpuElementwise().gate(x))


def test_what_flashinfer_cannot_do_exactly_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    standin = flashinfer_standin.install(monkeypatch, exact=False)
    fused = FlashInferElementwise(torch.bfloat16)
    exact, odd = torch.ones(64), torch.ones(64) + 2**-12
    x = numbers(ROWS, 64).bfloat16()
    assert fused.norm(exact, 1e-5)(x).dtype == fused.norm(odd, 1e-5)(x).dtype == torch.bfloat16
    assert type(fused.norm(odd, 1e-5)) is TorchNorm
    assert standin.calls == {"rmsnorm": 1}
    table = torch.ones(10, 32, 2)
    assert type(fused.heads(Heads(6, 2, table[:, :8]))) is TorchHeads  # heads of 16 elements
    assert type(fused.heads(Heads(6, 2, None))) is TorchHeads
    heads = fused.heads(Heads(6, 2, table))
    q, k, v = heads(numbers(ROWS, 10 * 64).bfloat16(), torch.arange(ROWS))
    assert {q.dtype, k.dtype, v.dtype} == {torch.bfloat16}
    assert standin.calls == {"rmsnorm": 1, "rope": 1}
    for inner, calls in ((24, 1), (20, 1), (32, 2)):
        assert fused.gate(numbers(ROWS, 2 * inner).bfloat16()).shape == (ROWS, inner)
        assert standin.calls["silu_and_mul"] == calls
