"""Keys and values in 8-bit floats on CUDA's backends: what is stored, by which scales, and how much is lost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention import AttentionRow, KVShape
from engine.attention.fixed_decode import FixedDecode
from engine.attention.flashinfer import FlashInferAttention, unsupported
from engine.attention.kv_scales import FP8, KVScales, WatchedAttention, from_fp8, to_fp8
from engine.attention.paged_kv import PagedKV
from engine.attention.torch_paged import TorchPagedAttention
from engine.errors import AttentionUnavailable
from tests.support import flashinfer_standin
from tests.support.flashinfer_standin import Standin
from tests.support.paged_rig import CPU, LAYERS, PagedRig, spelled_out

pytestmark = pytest.mark.usefixtures("one_thread")

SCALES = KVScales(keys=(1.0, 2.0, 0.5, 0.25, 1.0), values=(0.125, 1.0, 4.0, 1.0, 0.5))
HEADS = 6


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Standin:
    return flashinfer_standin.install(monkeypatch)


def rig_of(page_size: int, **options: Any) -> PagedRig:
    fixed = FixedDecode(batches=(4,), most_pages=64)
    make = (lambda kv: FlashInferAttention(kv, LAYERS, HEADS, fixed), lambda kv: TorchPagedAttention(kv, LAYERS))
    return PagedRig(make, heads=HEADS, page_size=page_size, dtype=FP8, **options)


def work(rig: PagedRig) -> None:
    """Prompts, mixed and single steps with padding, a fork, a sequence that breaks, and its pages for another."""
    first, second = rig.add(60), rig.add(40)
    rig.start(first)
    rig.start(second)
    rig.step({first: 21, second: 5})
    rig.step({first: 1, second: 7})
    rig.step({first: 1, second: 1}, padding=2)
    child = rig.fork(first)
    rig.step({first: 1, child: 3})
    rig.step({second: 3, child: 1}, bad=second)
    rig.drop(second)
    third = rig.add(30)
    rig.start(third)
    rig.step({third: 9, child: 1})
    rig.step({third: 1, child: 1}, padding=2)


@pytest.mark.parametrize("scales", [None, SCALES], ids=["1.0", "by layer"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_both_backends_attend_to_what_is_stored(standin: Standin, page_size: int, scales: KVScales | None) -> None:
    work(rig_of(page_size, num_pages=160 // page_size, scales=scales, attend_dtype=torch.float32))
    assert standin.calls["decode run"] > 0 < standin.calls["prefill run"]


def test_they_attend_in_16_bits(standin: Standin) -> None:
    rig = rig_of(16, scales=SCALES)
    number = rig.add(20)
    rig.start(number)
    assert {out.dtype for out in rig.step({number: 9})} == {torch.bfloat16}


def scales_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FlashInferAttention, "_scales", lambda self, layer: {})


def scales_exchanged(patch: pytest.MonkeyPatch) -> None:
    def exchanged(self: FlashInferAttention, layer: int) -> dict[str, float]:
        for_keys, for_values = self._kv.scales(layer)
        return {"k_scale": for_values, "v_scale": for_keys}

    patch.setattr(FlashInferAttention, "_scales", exchanged)


def scales_of_another_layer(patch: pytest.MonkeyPatch) -> None:
    right = FlashInferAttention._scales
    patch.setattr(FlashInferAttention, "_scales", lambda self, layer: right(self, (layer + 1) % len(LAYERS)))


def kept_as_16_bits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagedKV, "stored", lambda self, layer, k, v: (k.half(), v.half()))


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (scales_left_out, "k_scale None for keys and values in 8 bits"),
        (scales_exchanged, "not close"),
        (scales_of_another_layer, "not close"),
        (kept_as_16_bits, "append_key has the dtype torch.float16"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_mistake_is_seen(standin: Standin, monkeypatch: pytest.MonkeyPatch, seed: Any, message: str) -> None:
    rig = rig_of(4, scales=SCALES, attend_dtype=torch.float32)
    seed(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        work(rig)


def test_the_pages_take_half_of_what_16_bits_take() -> None:
    shape = KVShape(3, 2, 8, 5, 4, FP8)
    assert shape.page_bytes == 2 * 3 * 2 * 4 * 8
    kv = PagedKV(shape, CPU)
    layer = kv.layer(0)
    assert (layer.dtype, layer.shape) == (FP8, (6, 2, 4, 2, 8))
    assert 3 * layer.numel() * layer.element_size() == 6 * shape.page_bytes


@pytest.mark.parametrize(
    ("largest", "scale"),
    [
        (224.0, 1.0),
        (225.0, 2.0),
        (448.0, 2.0),
        (449.0, 4.0),
        (112.0, 0.5),
        (1.0, 2.0**-7),
        (0.0, 1.0),
        (math.inf, 1.0),
        (math.nan, 1.0),
    ],
)
def test_scales_leave_room_for_twice_the_largest(largest: float, scale: float) -> None:
    assert KVScales.for_largest([largest], [1.0]) == KVScales((scale,), (2.0**-7,))


@pytest.mark.parametrize("scale", [0.0, -1.0, 3.0, math.inf, math.nan])
def test_scales_are_powers_of_two(scale: float) -> None:
    with pytest.raises(ValueError, match="no power of two"):
        KVScales((scale,), (1.0,))


def test_scales_for_another_number_of_layers() -> None:
    with pytest.raises(ValueError, match="keys of 2 layers, and the values of 1"):
        KVScales((1.0, 1.0), (1.0,))
    with pytest.raises(ValueError, match="3 layers, but the scales of 2"):
        PagedKV(KVShape(3, 2, 8, 5, 4, FP8), CPU, KVScales.ones(2))


def test_what_is_too_large_is_cut_off_and_nan_stays() -> None:
    given = torch.tensor([1e9, -1e9, math.inf, math.nan, 0.25])
    kept = from_fp8(to_fp8(given, 2.0), 2.0, torch.float32)
    assert kept[[0, 1, 2, 4]].tolist() == [896.0, -896.0, 896.0, 0.25]
    assert kept[3].isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_storing_twice_changes_nothing(dtype: torch.dtype) -> None:
    once = from_fp8(to_fp8(torch.randn(1000).to(dtype), 2.0**-6), 2.0**-6, dtype)
    assert torch.equal(from_fp8(to_fp8(once, 2.0**-6), 2.0**-6, dtype), once)


def test_a_watched_backend_gives_the_scales_of_each_layer() -> None:
    kv = PagedKV(KVShape(2, 1, 8, 4, 4, torch.float32), CPU)
    watched = WatchedAttention(TorchPagedAttention(kv), 2, CPU)
    pages = np.arange(4, dtype=np.int32)
    for start, largest in ((0, 300.0), (3, -900.0), (6, 5.0)):
        watched.plan([AttentionRow(0, pages, start, 3, 16)])
        for layer in (0, 1):
            k = torch.full((3, 1, 8), largest * (layer + 1))
            watched.run(layer, torch.zeros(3, 2, 8), k, torch.full((3, 1, 8), 0.01))
    assert watched.scales() == KVScales.for_largest([900.0, 1800.0], [0.01, 0.01])


def test_what_cannot_be_served(standin: Standin) -> None:
    with pytest.raises(AttentionUnavailable, match=r"in torch\.float8_e5m2"):
        PagedKV(KVShape(1, 2, 64, 4, 4, torch.float8_e5m2), CPU)
    assert unsupported(128, FP8) is None
    kv = PagedKV(KVShape(1, 2, 64, 4, 4, FP8), CPU, attend_dtype=torch.float64)
    with pytest.raises(AttentionUnavailable, match=r"not in torch\.float64"):
        FlashInferAttention(kv, None, 6)


TOKENS, HEAD_DIM, KV_HEADS = 400, 64, 2


def ordinary(random: torch.Generator, size: float = 1.0) -> torch.Tensor:
    return size * torch.randn((TOKENS, KV_HEADS, HEAD_DIM), generator=random)


def with_outliers(random: torch.Generator) -> torch.Tensor:
    """Keys as in Llama (KIVI, arXiv 2402.02750): a few channels of all tokens are ten times as large as the others."""
    keys = ordinary(random)
    keys[..., ::16] *= 10
    return keys


def behind_a_bias(random: torch.Generator) -> torch.Tensor:
    """Keys as in Qwen2, with a bias of several hundred in a pair of channels, which RoPE turns."""
    keys, angles = ordinary(random), 1e-3 * torch.arange(TOKENS)[:, None]
    keys[..., 31] += 700 * torch.cos(angles)
    keys[..., 63] += 700 * torch.sin(angles)
    return keys


def small(random: torch.Generator) -> torch.Tensor:
    """Values as in first layers, whose inputs are embeddings that no block has added to."""
    return ordinary(random, 0.004)


@pytest.mark.parametrize(
    ("make_keys", "make_values", "plain", "by_layer"),
    [
        (ordinary, ordinary, (0.02, 0.05), (0.02, 0.05)),
        (with_outliers, ordinary, (0.05, 0.1), (0.05, 0.1)),
        (ordinary, small, (0.1, 0.3), (0.02, 0.05)),
        (behind_a_bias, ordinary, (0.25, 2.0), (0.25, 2.0)),
    ],
)
def test_how_much_is_lost(make_keys: Any, make_values: Any, plain: Any, by_layer: Any) -> None:
    """norm(attended - exact) / norm(exact) between bounds, with scales of 1.0, and with those found by looking.

    They help where values are small. Keys lose the same with any scale, and behind large biases too much.
    """
    random = torch.Generator().manual_seed(1)
    q = torch.randn((TOKENS, HEADS, HEAD_DIM), generator=random)
    k, v = make_keys(random), make_values(random)
    exact = spelled_out(q, k, v, LAYERS[0])
    found = KVScales.for_largest([float(k.abs().max())], [float(v.abs().max())])
    for scales, (least, most) in ((None, plain), (found, by_layer)):
        kv = PagedKV(KVShape(1, KV_HEADS, HEAD_DIM, 25, 16, FP8), CPU, scales)
        backend = TorchPagedAttention(kv)
        backend.plan([AttentionRow(0, np.arange(25, dtype=np.int32), 0, TOKENS, TOKENS)])
        lost = (backend.run(0, q, k, v).float() - exact).norm() / exact.norm()
        assert least <= float(lost) <= most
