"""The CPU's attention against attention spelled out in float64, whoever stands beside whom."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.attention import AttentionRow, CpuAttention, KVShape, LayerAttention
from engine.kernels.geometry import MANY, MOST_FEW, STRETCH
from tests.engine.attention_rig import LAYERS, Rig, Text, expected

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = (LayerAttention(), LayerAttention(window=37))
COUNTS = [1, 2, MOST_FEW, MOST_FEW + 1, MANY - 1, MANY, MANY + 1, MANY + MOST_FEW, MANY + MOST_FEW + 1, 2 * MANY + 3]


def fast_forward(rig: Rig, number: int, tokens: int) -> None:
    """Computes the first tokens of a sequence in one step."""
    if tokens:
        rig.step({number: tokens})


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_random_company(seed: int, page_size: int) -> None:
    rig, next_number = Rig(seed, page_size=page_size), 0
    random = rig.random
    for _ in range(25):
        while len(rig.sequences) < random.integers(2, 8) and rig.room_for(700):
            rig.add(next_number, int(random.choice([40, 300, 700])))
            next_number += 1
        counts = {}
        for number, held in rig.sequences.items():
            left = held.text.tokens - held.computed
            if left and random.random() < 0.8:
                counts[number] = min(left, int(random.choice([1, 1, 1, 3, 20, 150, 400])))
        if counts:
            rig.step(counts)
        for number, held in rig.sequences.items():
            if held.computed - held.own > 4 and random.random() < 0.2:
                rig.reject(number, int(random.integers(1, 5)))
        for number in [n for n in rig.sequences if random.random() < 0.1]:
            rig.drop(number)
        if rig.sequences and random.random() < 0.3:
            source = int(random.choice(list(rig.sequences)))
            more = int(random.integers(1, 200))
            if rig.sequences[source].computed and rig.room_for(rig.sequences[source].computed + more):
                rig.fork(source, next_number, more)
                next_number += 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"),
    [(2, 2, 64, 16), (6, 2, 80, 16), (4, 1, 128, 16), (16, 2, 16, 16), (3, 3, 2, 3), (9, 3, 64, 5)],
)
def test_any_geometry(heads: int, kv_heads: int, head_dim: int, page_size: int) -> None:
    rig = Rig(3, heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, layers=PLAIN)
    rig.add(0, 400)
    rig.add(1, 400)
    rig.step({0: 300, 1: 5})
    rig.step({0: 1, 1: 40})
    rig.step({1: 7, 0: 8})


@pytest.mark.parametrize("start", [0, 10, STRETCH - 3])
@pytest.mark.parametrize("count", COUNTS)
def test_any_number_of_tokens(count: int, start: int) -> None:
    rig = Rig(4, page_size=16)
    rig.add(0, start + count)
    fast_forward(rig, 0, start)
    rig.step({0: count})


@pytest.mark.parametrize("past", [STRETCH - 2, STRETCH - 1, STRETCH, 2 * STRETCH - 1, 2 * STRETCH, 5 * STRETCH + 17])
def test_keys_are_cut_into_stretches(past: int) -> None:
    layers = (*LAYERS, LayerAttention(window=STRETCH), LayerAttention(window=STRETCH + 44))
    rig = Rig(5, page_size=16, layers=layers)
    rig.add(0, past + 9)
    rig.step({0: past})
    rig.step({0: 1})
    rig.step({0: 8})


@pytest.mark.parametrize("scale", [8.0, -8.0])
def test_large_scores(scale: float) -> None:
    """Of some hundreds: e ** score is not a number of float32."""
    rig = Rig(6, layers=(LayerAttention(scale=scale), LayerAttention(softcap=200.0, scale=scale)), page_size=16)
    text = rig.text(300)
    rig.add(0, Text(text.q * 3, text.k * 3, text.v))
    rig.run({0: 250})
    rig.sequences[0].computed = 250
    found = rig.run({0: 1})[0]
    wanted = expected(rig.sequences[0].text, slice(250, 251), rig.layers, torch.float32)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-3)


# Who else is in a step.


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_company_changes_no_bit(dtype: torch.dtype, page_size: int) -> None:
    alone, beside = (Rig(seed, page_size=page_size, dtype=dtype) for seed in (7, 8))
    text = alone.text(400)
    for rig in (alone, beside):
        rig.add(0, text)
    for number, tokens in ((1, 500), (2, 70), (3, 300)):
        beside.add(number, tokens)
    beside.step({1: 300, 2: 3})
    for count, others in ((270, {1: 1}), (1, {1: 1, 2: 20, 3: 100}), (5, {2: 1, 3: 1}), (1, {1: 40})):
        assert torch.equal(alone.step({0: count})[0], beside.step({**others, 0: count})[0])


@pytest.mark.parametrize("start", [0, 5, 30, STRETCH - 4, STRETCH, 2 * STRETCH - 1, 2 * STRETCH + 90])
@pytest.mark.parametrize("page_size", [4, 16])
def test_few_tokens_get_the_same_bits_together_and_one_by_one(page_size: int, start: int) -> None:
    rig = Rig(9, page_size=page_size, layers=(*LAYERS, LayerAttention(window=STRETCH + 44)))
    rig.add(0, start + MOST_FEW)
    fast_forward(rig, 0, start)
    for count in range(1, MOST_FEW + 1):
        rig.sequences[0].computed = start
        together = rig.step({0: count})[0]
        rig.sequences[0].computed = start
        one_by_one = torch.cat([rig.step({0: 1})[0] for _ in range(count)], 1)
        assert torch.equal(together, one_by_one)


@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    one, several = (Rig(10, page_size=16) for _ in range(2))
    for rig in (one, several):
        rig.add(0, 700)
        rig.add(1, 100)
    for counts in ({0: 600, 1: 5}, {0: 1, 1: 60}, {0: 7, 1: 1}):
        alone = one.step(counts)
        torch.set_num_threads(threads)
        together = several.step(counts)
        torch.set_num_threads(1)
        for number in counts:
            assert torch.equal(alone[number], together[number])


# What is not a number.


@pytest.mark.parametrize("what", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_what_is_not_finite_stays_in_its_own_sequence(dtype: torch.dtype, bad: float, what: str) -> None:
    rig, clean = (Rig(11, dtype=dtype, layers=PLAIN, page_size=16) for _ in range(2))
    texts = [rig.text(200) for _ in range(3)]
    spoiled = getattr(texts[0], what).clone()
    spoiled[:, 150] = bad
    rig.add(0, replace(texts[0], **{what: spoiled}))
    rig.add(1, texts[1])
    clean.add(1, texts[1])
    rig.step({0: 145, 1: 100})
    clean.step({1: 100})
    for count in (6, 1, 20):  # the bad token is the last of six; it is seen from then on
        found, wanted = rig.run({0: count, 1: 1}), clean.step({1: 1})
        rig.sequences[0].computed += count
        rig.sequences[1].computed += 1
        assert torch.equal(found[1], wanted[1])
        if what != "q" or count == 6:
            assert not bool(found[0][:, -1].isfinite().any()), "it is not lost"
    rig.drop(0)
    rig.add(2, texts[2])  # in the pages that 0 had
    rig.step({2: 100, 1: 1})
    rig.step({2: 1, 1: 1})


def test_guesses_that_were_not_numbers_are_written_over() -> None:
    rig = Rig(12, page_size=16)
    held = rig.add(0, 300)
    rig.step({0: 100})
    held.text.k[:, 101:104] = held.text.v[:, 101:104] = float("nan")
    rig.run({0: 4})
    held.computed = 104
    rig.reject(0, 3)
    rig.step({0: 1})
    rig.step({0: 20})


# What is refused.


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (AttentionRow(0, pages(0), 0, 5, 5), "1 pages cannot take 5 tokens from 0 on"),
        (AttentionRow(0, pages(0, 1), 6, 3, 9), "2 pages cannot take 3 tokens from 6 on"),
        (AttentionRow(0, pages(0), 0, 0, 5), "cannot take 0 tokens"),
        (AttentionRow(0, pages(0), -1, 2, 5), "from -1 on"),
        (AttentionRow(0, pages(0, 8), 0, 5, 5), "a page beyond the 8 of the pool"),
        (AttentionRow(0, pages(-1), 0, 1, 5), "a page beyond"),
    ],
)
def test_bad_rows_are_refused(row: AttentionRow, message: str) -> None:
    attention = CpuAttention(KVShape(1, 2, 8, 8, 4, torch.float32))
    with pytest.raises(ValueError, match=message):
        attention.plan([AttentionRow(1, pages(7), 0, 4, 4), row])


def test_pages_that_a_step_does_not_reach_do_not_matter() -> None:
    rig = Rig(14)
    held = rig.add(0, 20)
    wanted = rig.step({0: 8})[0]
    held.computed, held.pages[2:] = 0, -1
    assert torch.equal(rig.step({0: 8})[0], wanted)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((3, 4, 4), (3, 2, 8), (3, 2, 8)),
        ((3, 5, 8), (3, 2, 8), (3, 2, 8)),
        ((3, 4, 8), (3, 1, 8), (3, 1, 8)),
        ((3, 4, 8), (3, 2, 8), (3, 2, 4)),
        ((2, 4, 8), (2, 2, 8), (2, 2, 8)),
        ((3, 4, 8), (4, 2, 8), (3, 2, 8)),
    ],
)
def test_bad_shapes_are_refused(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    attention = CpuAttention(KVShape(1, 2, 8, 8, 4, torch.float32))
    attention.plan([AttentionRow(0, pages(3), 0, 3, 3)])
    with pytest.raises(ValueError, match=r"queries, keys and values of|tokens, and 3 were planned"):
        attention.run(0, torch.zeros(q), torch.zeros(k), torch.zeros(v))


def test_a_step_must_be_planned() -> None:
    attention = CpuAttention(KVShape(1, 2, 8, 8, 4, torch.float32))
    with pytest.raises(RuntimeError, match="not planned"):
        attention.run(0, torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))


def test_there_is_attention_for_each_layer() -> None:
    with pytest.raises(ValueError, match="2 layers, but the attention of 3"):
        CpuAttention(KVShape(2, 2, 8, 8, 4, torch.float32), LAYERS)


@pytest.mark.parametrize("layout", ["apart", "turned over", "bfloat16"])
def test_tensors_of_any_layout(layout: str) -> None:
    rig = Rig(13, layers=PLAIN)
    held = rig.add(0, 20)
    wanted = rig.step({0: 20})[0]
    held.computed = 0
    rig.attention.plan([AttentionRow(0, held.pages, 0, 20, 20)])
    for layer in range(len(PLAIN)):
        q, k, v = (getattr(held.text, name)[layer] for name in "qkv")
        if layout == "apart":
            q, k, v = torch.cat((q, k, v), 1).split((6, 2, 2), 1)
        elif layout == "turned over":
            q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
        else:
            q, k, v = (x.bfloat16() for x in (q, k, v))
        found = rig.attention.run(layer, q, k, v)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted[layer], atol=0.05 if layout == "bfloat16" else 0, rtol=0)


def test_the_room_for_partial_results_is_made_at_once_for_all_windows() -> None:
    attention = CpuAttention(KVShape(2, 2, 8, 100, 16, torch.float32), (LayerAttention(20), LayerAttention()))
    q, k = torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)
    for layer in range(2):
        attention.call(layer, q, k, k, torch.empty(1, 2, 8))
    attention.plan([AttentionRow(0, np.arange(100, dtype=np.int32), 1290, 1, 1600)])
    windowed, plain = (attention.planned(window) for window in (20, None))
    assert windowed["num_merges"] == plain["num_merges"] == 1
    assert windowed["partials"] == plain["partials"]
