"""Keys and values in every type: what is attended to is what the pool gives back, however it came there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from cache import PagePool, PrefixCache
from engine.attention import AttentionRow, KVShape, LayerAttention, TorchAttention
from engine.attention.kv_pool import DensePool, Int8Pool, KVPool
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.loading import load_engine
from engine.models.decoder import Decoder
from engine.weights import open_model
from tests.engine.conftest import StartEngine
from tests.support.generation import generate

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = (
    LayerAttention(),
    LayerAttention(window=6),
    LayerAttention(softcap=5.0),
    LayerAttention(window=9, softcap=5.0),
)
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
TOKENS, CACHED = 45, 32
DTYPES = [torch.float32, torch.bfloat16, torch.int8]


class Attending:
    """Tokens 0 .. TOKENS - 1 of one text through four layers of made-up queries, keys and values."""

    def __init__(self, dtype: torch.dtype, page_size: int) -> None:
        num_pages = 4 * TOKENS
        self.page_size = page_size
        self.attention = TorchAttention(KVShape(len(LAYERS), KV_HEADS, HEAD_DIM, num_pages, page_size, dtype), LAYERS)
        random = torch.Generator().manual_seed(7)
        self._qkv = torch.randn((len(LAYERS), TOKENS, HEADS + 2 * KV_HEADS, HEAD_DIM), generator=random)
        self._pages = np.random.default_rng(7).permutation(num_pages).astype(np.int32)

    def pages(self, table: int) -> np.ndarray:
        """One of four page tables that have nothing in common, in no order."""
        return self._pages[table * TOKENS : (table + 1) * TOKENS]

    def step(self, *rows: AttentionRow) -> torch.Tensor:
        """What the last token of the last row gets from each layer: [layers, HEADS, HEAD_DIM]."""
        self.attention.plan(rows)
        tokens = torch.cat([torch.arange(row.start, row.start + row.count) for row in rows])
        out = []
        for layer, qkv in enumerate(self._qkv[:, tokens]):
            q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            out.append(self.attention.run(layer, q, k, v)[-1])
        return torch.stack(out)

    def last(self, sequence: int, pages: np.ndarray, start: int, *counts: int) -> torch.Tensor:
        """Tokens from `start` on in steps of these counts and of what is left, the last one in a step of its own."""
        left = TOKENS - 1 - start - sum(counts)
        for count in (*counts, *([left] if left else []), 1):
            out = self.step(AttentionRow(sequence, pages, start, count, TOKENS))
            start += count
        return out


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_last_token_sees_the_same_bits_on_every_way(dtype: torch.dtype, page_size: int) -> None:
    made = Attending(dtype, page_size)
    cold = made.last(0, made.pages(0), 0)

    assert torch.equal(made.last(1, made.pages(1), 0, 7, 1, 20, 1, 1), cold), "in chunks"

    # Sequence 0 is still running; another finds its full pages, and brings pages of its own for the rest.
    full = CACHED // page_size
    found = np.concatenate((made.pages(0)[:full], made.pages(2)[full:]))
    assert torch.equal(made.last(2, found, CACHED), cold), "from the cache"

    made.attention.drop(2)  # preempted: the pages are found again
    assert torch.equal(made.last(2, found, CACHED, 3), cold), "after a preemption"

    chunked = np.concatenate((made.pages(1)[:full], made.pages(3)[full:]))
    assert torch.equal(made.last(3, chunked, CACHED), cold), "from pages filled in chunks"


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_branches_of_a_fork_see_the_same_bits(dtype: torch.dtype, page_size: int) -> None:
    made = Attending(dtype, page_size)
    cold = made.last(0, made.pages(0), 0)
    at = TOKENS - 10  # within a page of 16
    cache = PrefixCache(PagePool(4 * TOKENS, page_size))
    text = np.arange(TOKENS, dtype=np.int32)
    lease = cache.acquire(text[:at])
    lease.reserve(TOKENS)
    made.step(AttentionRow(1, np.asarray(lease.pages, np.int32), 0, at, TOKENS))
    lease.commit(text[:at])
    branch = lease.fork()
    branch.reserve(TOKENS)
    made.attention.fork(1, 2, at, branch.tail_copy)
    for sequence, held in ((1, lease), (2, branch)):
        assert torch.equal(made.last(sequence, np.asarray(held.pages, np.int32), at, 4), cold)
        held.commit(text)
        held.release()
    found = cache.acquire(text, limit=TOKENS - 1)
    assert found.cached_tokens >= TOKENS - page_size
    found.reserve(TOKENS)
    assert torch.equal(made.last(3, np.asarray(found.pages, np.int32), found.cached_tokens), cold)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_without_native_bfloat16_attention_is_in_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.attention.kv_pool.multiplies_bfloat16", lambda: False)
    made = Attending(dtype, 16)
    cold = made.last(0, made.pages(0), 0)
    assert cold.dtype == torch.float32
    full = CACHED // 16
    found = np.concatenate((made.pages(0)[:full], made.pages(2)[full:]))
    assert torch.equal(made.last(2, found, CACHED), cold), "from the cache"


def test_neighbours_in_a_step_change_no_bit() -> None:
    made = Attending(torch.int8, 4)
    cold = made.last(0, made.pages(0), 0)
    rows = [AttentionRow(n, made.pages(n), 0, TOKENS - 1, TOKENS) for n in (1, 2)]
    made.step(*rows)
    made.step(AttentionRow(1, made.pages(1), TOKENS - 1, 1, TOKENS), replace(rows[1], start=TOKENS - 1, count=1))
    made.attention.drop(2)
    assert torch.equal(made.last(2, made.pages(2), CACHED), cold)


def pool_of(dtype: torch.dtype, kind: str, slots: int, head_dim: int) -> KVPool:
    kept = {"dense": dtype, "bfloat16": torch.bfloat16, "int8": torch.int8}[kind]
    shape = KVShape(1, 1, head_dim, slots, 1, kept)
    return Int8Pool(shape, dtype) if kind == "int8" else DensePool(shape, dtype)


EXTREME = [0.0, 1e-45, 1.4e-38, 1.49e-36, 1.493e-36, 1.5e-36, 3e38]  # 127 of the smallest step are 1.493e-36


@given(
    values=st.lists(
        st.floats(-(2.0**126), 2.0**126, width=32) | st.sampled_from(EXTREME),
        min_size=8,
        max_size=8,
    )
)
@pytest.mark.parametrize("kind", ["dense", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(deadline=None, max_examples=200)
def test_the_pool_gives_back_what_it_was_given(dtype: torch.dtype, kind: str, values: list[float]) -> None:
    pool = pool_of(dtype, kind, 3, 4)
    k = torch.tensor(values).view(2, 1, 4)
    rounded = pool.rounded(k, k.flip(0))
    stored = rounded.permute(0, 2, 1, 3)[:, None]  # [2, layers, H, n, D]
    pool.write(1, stored)
    out = torch.empty_like(stored)
    pool.read(1, out)
    assert torch.equal(out, stored)
    if kind == "int8":
        largest = k.abs().amax(-1, keepdim=True)
        allowed = largest / 127 * 0.51 + largest * 2**-8 + torch.finfo(torch.float32).tiny
        assert bool(((rounded[0].float() - k).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_random_elements_come_back_from_8_bits_bit_for_bit(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    pool = pool_of(dtype, "int8", 20_000, 16)
    size = torch.exp(torch.randn((20_000, 1, 1), generator=random) * 8)
    k = torch.randn((20_000, 1, 16), generator=random) * size
    stored = pool.rounded(k, k).permute(0, 2, 1, 3)[:, None]
    pool.write(0, stored)
    out = torch.empty_like(stored)
    pool.read(0, out)
    assert torch.equal(out, stored)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_in_its_token(bad: float) -> None:
    pool = pool_of(torch.bfloat16, "int8", 2, 4)
    k = torch.ones((2, 1, 4))
    k[0, 0, 1] = bad
    stored = pool.rounded(k, k).permute(0, 2, 1, 3)[:, None]
    pool.write(0, stored)
    out = torch.empty_like(stored)
    pool.read(0, out)
    assert not bool(out[:, 0, 0, 0].isfinite().any())
    assert torch.equal(out[:, 0, 0, 1], torch.ones(2, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("dtype", "page_size", "page_bytes"),
    [
        (torch.float32, 1, 2 * 30 * 3 * 64 * 4),
        (torch.bfloat16, 1, 2 * 30 * 3 * 64 * 2),
        (torch.bfloat16, 16, 16 * 2 * 30 * 3 * 64 * 2),
        (torch.int8, 1, 2 * 30 * 3 * (64 + 2)),
        (torch.int8, 16, 16 * 2 * 30 * 3 * (64 + 2)),
    ],
    ids=str,
)
def test_page_bytes(dtype: torch.dtype, page_size: int, page_bytes: int) -> None:
    """Of the default model: 8 bits and their scales take 52 % of bfloat16."""
    assert KVShape(30, 3, 64, 10, page_size, dtype).page_bytes == page_bytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pool_takes_the_bytes_that_its_shape_says(dtype: torch.dtype) -> None:
    shape = KVShape(3, 2, 16, 10, 16, dtype)
    pool = DensePool(shape, torch.float32) if dtype != torch.int8 else Int8Pool(shape, torch.float32)
    held = [value for value in vars(pool).values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in held) == shape.num_pages * shape.page_bytes


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.03), (torch.int8, 0.05)], ids=str)
def test_logits_stay_close_to_those_of_float32(
    dtype: torch.dtype, bound: float, tiny: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    converted = open_model(str(tiny[0]), tmp_path, "float32")
    model = Decoder(converted.config, converted.tensors())
    ids = torch.randint(3, model.spec.vocab_size, (200,), generator=torch.Generator().manual_seed(2))

    def logits(kv: torch.dtype) -> torch.Tensor:
        attention = TorchAttention(model.spec.kv_shape(13, 16, kv))
        attention.plan([AttentionRow(0, np.arange(13, dtype=np.int32), 0, 200, 200)])
        with torch.inference_mode():
            return model.forward(ids, torch.arange(200), torch.arange(200), attention)

    exact, close = logits(torch.float32), logits(dtype)
    error = (close - exact).norm() / exact.norm()
    assert 0 < float(error) < bound


async def test_an_engine_with_8_bits_answers_the_same_cold_and_cached(start_engine: StartEngine) -> None:
    engine = start_engine(kv_dtype="int8", pool_tokens=2048, max_batched_tokens=16)
    dense = start_engine(kv_dtype="bfloat16", pool_tokens=2048, max_batched_tokens=16)
    assert (engine.info.kv_dtype, dense.info.kv_dtype) == ("int8", "bfloat16")
    assert engine.info.pool_bytes == dense.info.pool_bytes * (16 + 2) // (16 * 2)  # heads of 16 elements
    prompt = np.arange(3, 90, dtype=np.int32)
    options = {"max_tokens": 24, "min_tokens": 24, "ignore_eos": True}
    cold = await generate(engine, prompt, use_cache=False, **options)
    first = await generate(engine, prompt, **options)
    cached = await generate(engine, prompt, **options)
    assert first.ids == cold.ids
    assert (cached.ids, cached.cached) == (cold.ids, 80)
    assert len(cold.ids) == 24
    pages = engine.snapshot().pages
    assert pages.free + pages.evictable + pages.locked + pages.private == 128


def test_a_pool_larger_than_the_memory_is_refused_by_its_true_size(
    tiny: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="a pool of 10000000000000 tokens takes"):
        load_engine(
            EngineConfig(tmp_path, str(tiny[0]), dtype="float32", kv_dtype="int8", pool_tokens=10_000_000_000_000)
        )
