"""Keys and values in every type: what is attended to is what the pool keeps of them, however it came there."""

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
from engine.attention import AttentionRow, CpuAttention, KVShape, LayerAttention
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.loading import load_engine
from engine.models.decoder import Decoder
from engine.weights import open_model
from tests.engine.attention_rig import Rig, stored
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
        self.attention = CpuAttention(KVShape(len(LAYERS), KV_HEADS, HEAD_DIM, num_pages, page_size, dtype), LAYERS)
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


def test_neighbours_in_a_step_change_no_bit() -> None:
    made = Attending(torch.int8, 4)
    cold = made.last(0, made.pages(0), 0)
    rows = [AttentionRow(n, made.pages(n), 0, TOKENS - 1, TOKENS) for n in (1, 2)]
    made.step(*rows)
    made.step(AttentionRow(1, made.pages(1), TOKENS - 1, 1, TOKENS), replace(rows[1], start=TOKENS - 1, count=1))
    made.attention.drop(2)
    assert torch.equal(made.last(2, made.pages(2), CACHED), cold)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_attention_is_that_of_rounded_keys_and_values(dtype: torch.dtype, page_size: int) -> None:
    rig = Rig(1, head_dim=HEAD_DIM, page_size=page_size, dtype=dtype)
    rig.add(0, 700)
    rig.add(1, 200)
    rig.step({0: 500, 1: 3})
    rig.step({0: 1, 1: 45})
    rig.fork(1, 2, 30)
    rig.reject(0, 1)
    rig.step({2: 5, 0: 8, 1: 1})


def kept(dtype: torch.dtype, values: torch.Tensor) -> torch.Tensor:
    """What the pool keeps of values [tokens, head_dim]: a token that sees nothing but itself gets its own value."""
    tokens, head_dim = values.shape
    attention = CpuAttention(KVShape(1, 1, head_dim, tokens, 1, dtype))
    pages = np.arange(tokens, dtype=np.int32)
    attention.plan([AttentionRow(n, pages[n : n + 1], 0, 1, 1) for n in range(tokens)])
    zeros = torch.zeros(tokens, 1, head_dim)
    return attention.run(0, zeros, zeros, values[:, None])[:, 0]


EXTREME = [0.0, 1e-45, 1.4e-38, 1.49e-36, 1.493e-36, 1.5e-36, 3e38]  # 127 of the smallest step are 1.493e-36
HALFWAY = [1.00390625, 1.01171875]  # between two neighbours of bfloat16: one goes down, one up


@given(
    values=st.lists(
        st.floats(-(2.0**126), 2.0**126, width=32) | st.sampled_from(EXTREME + HALFWAY),
        min_size=32,
        max_size=32,
    )
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=200)
def test_the_pool_gives_back_what_it_was_given(dtype: torch.dtype, values: list[float]) -> None:
    x = torch.tensor(values).view(2, HEAD_DIM)
    assert torch.equal(kept(dtype, x), stored(x, dtype))
    if dtype == torch.int8:
        largest = x.abs().amax(-1, keepdim=True)
        allowed = largest / 127 * 0.51 + largest * 2**-8 + torch.finfo(torch.float32).tiny
        assert bool(((stored(x, dtype) - x).abs() <= allowed).all())


@pytest.mark.parametrize("head_dim", [HEAD_DIM, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_elements_of_any_size_are_kept(dtype: torch.dtype, head_dim: int) -> None:
    random = torch.Generator().manual_seed(3)
    size = torch.exp(torch.randn((3000, 1), generator=random) * 8)
    x = torch.randn((3000, head_dim), generator=random) * size
    assert torch.equal(kept(dtype, x), stored(x, dtype))
    assert torch.equal(kept(dtype, stored(x, dtype)), stored(x, dtype)), "rounded twice"


@pytest.mark.parametrize("element", [0, 15, 20, 63])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_stays_in_its_token(dtype: torch.dtype, bad: float, element: int) -> None:
    x = torch.ones(3, 64)
    x[1, element] = bad
    found = kept(dtype, x)
    assert torch.equal(found[[0, 2]], x[[0, 2]])
    assert not bool(found[1, element].isfinite())
    if dtype == torch.int8:  # in which all elements share what is not finite
        assert not bool(found[1].isfinite().any())


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
    held = [value for value in vars(CpuAttention(shape)).values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in held) == shape.num_pages * shape.page_bytes


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.03), (torch.int8, 0.05)], ids=str)
def test_logits_stay_close_to_those_of_float32(
    dtype: torch.dtype, bound: float, tiny: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    converted = open_model(str(tiny[0]), tmp_path, "float32")
    model = Decoder(converted.config, converted.tensors())
    ids = torch.randint(3, model.spec.vocab_size, (200,), generator=torch.Generator().manual_seed(2))

    def logits(kv: torch.dtype) -> torch.Tensor:
        attention = CpuAttention(model.spec.kv_shape(13, 16, kv))
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
