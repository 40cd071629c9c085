"""Bytes, FLOP, schedules and definitions, beside figures worked out by hand."""

from __future__ import annotations

import pytest

from tests.gpu.budget import Budget
from tests.gpu.costs import Shape, own_layers, stored_layers
from tests.gpu.loads import LOADS, Load, first_tokens, schedule, summary
from tests.gpu.measure import outside

MISTRAL = Shape()
TINY = Shape(layers=2, hidden=8, heads=4, kv_heads=2, head_dim=2, inner=16, vocabulary=10)


def test_weights_of_a_layer() -> None:
    """q 8 x 8, k and v 8 x 4 each, output 8 x 8; gate and up 8 x 16 each, down 16 x 8."""
    assert TINY.layer_weights == 64 + 32 + 32 + 64 + 3 * 128
    assert TINY.head_weights == 80
    assert TINY.weights == 2 * 576 + 80


def test_weights_of_mistral() -> None:
    """7,241,732,096 parameters, less 131,072,000 of embeddings and 65 norms of 4,096."""
    assert MISTRAL.weights == 7_241_732_096 - 131_072_000 - 65 * 4096


def test_bytes_of_a_token() -> None:
    """Keys and values, 32 layers, 8 heads of 128 elements of two bytes: 128 KiB."""
    assert MISTRAL.kv_bytes(1) == 131_072
    assert MISTRAL.kv_bytes(2048, element=1) == 2048 * 65_536


def test_bytes_of_a_decode_step() -> None:
    assert TINY.decode_bytes(3, 5) == 2 * 1232 + 3 * 5 * (2 * 2 * 2 * 2 * 2)
    assert TINY.decode_bytes(3, 5, weight=1) == TINY.decode_bytes(3, 5) - TINY.layers * TINY.layer_weights
    assert MISTRAL.decode_bytes(1, 2048) == 2 * MISTRAL.weights + (1 << 28)


def test_flops_of_a_prefill() -> None:
    """Three tokens make 1 + 2 + 3 pairs; a pair costs 4 FLOP for each of 2 layers x 4 heads x 2 elements."""
    assert TINY.prefill_flops([3]) == 2 * 2 * 576 * 3 + 4 * 16 * 6 + 2 * 80
    assert TINY.prefill_flops([3, 1]) == 2 * 2 * 576 * 4 + 4 * 16 * 7 + 2 * 2 * 80


def test_flops_of_mistral() -> None:
    """2,048 tokens: 28.6 TFLOP of products and 1.1 of attention."""
    assert MISTRAL.prefill_flops([2048]) == pytest.approx(28.59e12 + 1.10e12, rel=1e-3)


@pytest.mark.parametrize(("free", "layers"), [(80e9, 32), (24e9, 31), (16e9, 20), (1e9, 1)])
def test_layers_with_weights_of_their_own(free: float, layers: int) -> None:
    """A layer takes 436 MB, embeddings and head 524 MB, and 60 % of the memory is for both."""
    assert own_layers(MISTRAL, int(free)) == layers


@pytest.mark.parametrize(
    ("free", "tokens", "element", "layers"),
    [(130e9, 64 * 16384, 2, 25), (130e9, 64 * 16384, 1, 32), (30e9, 64 * 2048, 2, 32), (1e9, 64 * 16384, 2, 0)],
)
def test_layers_with_pages_of_their_own(free: float, tokens: int, element: int, layers: int) -> None:
    """A token takes 4 KiB of a layer in 16 bits; 85 % of the memory is for pages."""
    assert stored_layers(MISTRAL, int(free), tokens, element) == layers


def test_prompts_in_full_steps() -> None:
    assert schedule([5, 4, 3], 6) == [[(0, 0, 5), (1, 0, 1)], [(1, 1, 3), (2, 0, 3)]]
    assert schedule([7], 3) == [[(0, 0, 3)], [(0, 3, 3)], [(0, 6, 1)]]
    assert schedule([3, 3], 6) == [[(0, 0, 3), (1, 0, 3)]]


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_every_prompt_is_computed_once(load: Load) -> None:
    steps = schedule([load.prompt] * load.rows, 8192)
    computed = [0] * load.rows
    for spans in steps:
        assert sum(count for *_, count in spans) <= 8192
        for row, start, count in spans:
            assert start == computed[row]
            computed[row] += count
    assert computed == [load.prompt] * load.rows
    assert len(steps) == load.rows * load.prompt // 8192 + (load.rows * load.prompt % 8192 > 0)


def test_a_first_token_comes_with_the_last_of_its_prompt() -> None:
    steps = schedule([5, 4, 3], 6)
    assert first_tokens([5, 4, 3], steps, [1.0, 2.5]) == [1.0, 2.5, 2.5]


def test_figures_of_a_load() -> None:
    """Two rows, first tokens after 1 and 2 s, and 10 more until 4 s."""
    figures = summary(Load("", 8, 11, 0, rows=2), [1.0, 2.0], 2.0, 4.0)
    assert figures == {
        "TTFT p50, ms": 1500.0,
        "TTFT max, ms": 2000.0,
        "TPOT p50, ms": 250.0,
        "step, ms": 200.0,
        "tokens/s": 5.5,
        "prefill": 0.5,
        "decode": 0.5,
    }


def test_what_is_outside_of_kernels() -> None:
    assert outside(4.0, 3.0) == 0.25
    assert outside(4.0, 4.1) == 0.0


def test_a_budget_is_spent_by_the_clock() -> None:
    now = [100.0]
    budget = Budget.begin(10.0, lambda: now[0])
    assert budget.holds(10.0)
    now[0] = 104.0
    assert (budget.spent, budget.left) == (4.0, 6.0)
    assert budget.holds(6.0)
    assert not budget.holds(6.1)
    now[0] = 120.0
    assert budget.left == 0.0
