"""What is measured on a card, run on the CPU with a tiny decoder over the stand-in: figures, order, and what fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.gpu.budget import Budget
from tests.gpu.checks import BackendName
from tests.gpu.costs import Shape
from tests.gpu.decoder import RandomDecoder, Tables, flat
from tests.gpu.device import Host
from tests.gpu.loads import Load
from tests.gpu.measure import Card, Measurement, all_measurements, measure_card, run_all
from tests.gpu.operations import Plain
from tests.gpu.report import Row
from tests.gpu.stepper import Stepper
from tests.support import flashinfer_standin
from tests.support.flashinfer_standin import Standin

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = Shape(layers=3, hidden=64, heads=4, kv_heads=2, head_dim=64, inner=96, vocabulary=1024)
CARD = Card(copy_gbs=10.0, tflops=0.1)
LOAD = Load("a load", 20, 5, 1.0, rows=3)


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Standin:
    return flashinfer_standin.install(monkeypatch, exact=False)


def model_of(own: int = 3, dtype: torch.dtype = torch.bfloat16) -> RandomDecoder:
    torch.manual_seed(0)
    return RandomDecoder(TINY, own, Plain(), torch.device("cpu"), dtype)


def plenty(seconds: float = 1e9) -> Budget:
    return Budget.begin(seconds, lambda: 0.0)


def test_all_that_is_measured(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gpu.measure._STEPS", 3)
    measurements = list(
        all_measurements(
            Host(), CARD, model_of(), ["flashinfer", "torch-paged"], True, (1, 3), (9, 40), 33, [LOAD], [32]
        )
    )
    rows = run_all(measurements, plenty())
    assert [row.note for row in rows] == [""] * len(rows)
    assert standin.calls["shared plan"] == 1 + 3 + 3, "captured, warmed up, measured"
    assert [(row.table, row.name) for row in rows] == [(one.table, one.name) for one in measurements]
    assert [row.name for row in rows] == [
        *("1 x 9", "1 x 40", "3 x 9", "3 x 40"),
        *("33 tokens, flashinfer", "33 tokens, torch-paged"),
        "a load",
        *("3 x 160, 32 shared, read once", "3 x 160, 32 shared, read by each"),
        *("1 x 40, int8", "3 x 40, int8", "33 tokens, flashinfer, int8 weights"),
        *("1 x 40, fp8", "3 x 40, fp8", "33 tokens, flashinfer, fp8 weights"),
        *("1 x 40, flashinfer, no graph", "1 x 40, torch-paged, no graph"),
        *("3 x 40, flashinfer, no graph", "3 x 40, torch-paged, no graph"),
        *("3 x 9", "3 x 40"),
    ]
    assert all(value >= 0 for row in rows for value in row.figures.values())
    decode, prefill = rows[0].figures, rows[4].figures
    assert decode["GB/s"] == pytest.approx(TINY.decode_bytes(1, 9) / decode["ms"] / 1e6)
    assert decode["of copy"] == pytest.approx(decode["GB/s"] / 10.0)
    assert prefill["TFLOP/s"] == pytest.approx(TINY.prefill_flops([33]) / prefill["ms"] / 1e9)
    assert prefill["of product"] == pytest.approx(prefill["TFLOP/s"] / 0.1)
    narrow = rows[9].figures
    assert narrow["GB/s"] == pytest.approx(TINY.decode_bytes(1, 40, weight=1) / narrow["ms"] / 1e6)
    eight_bits = rows[-1].figures
    assert eight_bits["GB/s"] == pytest.approx(TINY.decode_bytes(3, 40, 1) / eight_bits["ms"] / 1e6)


def test_the_card() -> None:
    card = measure_card(Host(), size=1 << 12, product=32, repeats=2)
    assert card.copy_gbs > 0
    assert card.tflops > 0


def test_what_fails_and_what_has_no_time_are_rows_that_say_so() -> None:
    def fails() -> Row:
        raise MemoryError("too\nlarge")

    measurements = [Measurement("a", "b", 1.0, fails), Measurement("a", "c", 99.0, fails)]
    assert run_all(measurements, plenty(10.0)) == [
        Row("a", "b", note="failed: MemoryError: too large"),
        Row("a", "c", note="left out: no time left"),
    ]


@pytest.mark.parametrize("backend", ["flashinfer", "torch-paged"])
def test_tokens_one_by_one_are_those_of_a_prompt(standin: Standin, backend: BackendName) -> None:
    """Tokens 0 .. 3 of a prompt, each computed by a step of its own, and all of it at once."""
    model, last = model_of(dtype=torch.float16), torch.tensor([0])
    at_once, one_by_one = (Stepper(Host(), model, backend, 1, 64) for _ in range(2))
    wanted = at_once.prefill([(0, 0, 4)])()
    for token in range(4):
        one_by_one.plan_decode(token + 1)
        tokens = torch.tensor([token], dtype=torch.int32)
        given = model.forward(tokens, tokens, last, one_by_one.attention, one_by_one.stored)
    assert given.tolist() == wanted.tolist()


@pytest.mark.parametrize("narrow", [torch.int8, torch.float8_e4m3fn])
def test_a_narrow_model_has_the_weights_that_fit(narrow: torch.dtype) -> None:
    """The head twice, and two layers of one byte a weight in six tenths of the memory."""
    free = int((2 * 2 * TINY.head_weights + 2.5 * TINY.layer_weights) / 0.6)
    for model, own in ((model_of(), 2), (model_of(own=1), 1)):
        narrowed = model.narrowed(narrow, free)
        assert (narrowed.own, narrowed.weight_bytes, model.weight_bytes) == (own, 1, 2)


def test_a_step_continues_from_its_own_tokens(standin: Standin) -> None:
    stepper = Stepper(Host(), model_of(), "flashinfer", 2, 64)
    replay = stepper.capture_decode(41)
    chosen = []
    for context in (41, 42):
        stepper.plan_decode(context)
        replay()
        chosen.append(stepper.fetch_tokens().wait()[0].tolist())
        assert stepper._positions.tolist() == [context, context]
    assert chosen[0] != chosen[1]


def test_layers_that_share(standin: Standin) -> None:
    small = Host(memory=TINY.kv_bytes(4 * 16) * 8 // 10)
    stepper = Stepper(small, model_of(own=2), "flashinfer", 1, 64)
    assert (stepper.stored, stepper.shared) == (2, "weights of 2 layers for 3, pages of 2 layers for 3")
    stepper.prefill([(0, 0, 17)])()
    with pytest.raises(MemoryError, match="keys and values of 64 tokens do not fit"):
        Stepper(Host(memory=1000), model_of(), "flashinfer", 1, 64)


def test_shared_tokens_are_measured_where_they_are_read_once(standin: Standin) -> None:
    with_it, without = (
        [one.name for one in all_measurements(Host(), CARD, model_of(), ["flashinfer"], shares)]
        for shares in (True, False)
    )
    assert [name for name in with_it if name not in without] == [
        f"64 x {tokens + 128:,}, {tokens:,} shared, read {how}" for tokens in (256, 2048) for how in ("once", "by each")
    ]


def test_page_tables_have_nothing_in_common() -> None:
    tables = Tables(3, 33, 16)
    rows = tables.rows([(0, 0, 33), (2, 5, 1)])
    assert (tables.per_row, tables.num_pages) == (3, 9)
    assert [len(row.pages) for row in rows] == [3, 3]
    assert len({int(page) for row in range(3) for page in tables.rows([(row, 0, 1)])[0].pages}) == 9
    shared = Tables(3, 50, 16, shared=32)
    assert shared.num_pages == 2 + 3 * 2
    pages = np.array([row.pages for row in shared.rows([(row, 0, 1) for row in range(3)])])
    assert (pages[:, :2] == pages[0, :2]).all()
    assert len(np.unique(pages)) == shared.num_pages
    positions, last = flat([(0, 0, 3), (2, 5, 1), (1, 7, 2)], torch.device("cpu"))
    assert positions.tolist() == [0, 1, 2, 5, 7, 8]
    assert last.tolist() == [2, 3, 5]


def test_rotation_turns_by_the_distance_alone() -> None:
    q, k = torch.randn(1, 1, 64), torch.randn(1, 1, 64)
    at = lambda a, b: torch.tensor([a, b], dtype=torch.int32)  # noqa: E731

    def score(first: int, second: int) -> float:
        turned, _ = Plain().rotate(torch.cat((q, k)), k.expand(2, 1, 64), at(first, second))
        return float((turned[0] * turned[1]).sum())

    assert score(3, 10) == pytest.approx(score(103, 110), rel=1e-3, abs=1e-3)
    assert score(3, 10) != pytest.approx(score(3, 40), rel=1e-3, abs=1e-3)


def test_norm_and_gate() -> None:
    x = torch.tensor([[3.0, 4.0]])
    assert Plain().norm(x, torch.tensor([1.0, 2.0]))[0].tolist() == pytest.approx(
        [3 / 12.5**0.5, 8 / 12.5**0.5], rel=1e-4
    )
    total, normed = Plain().add_norm(x, x, torch.ones(2))
    assert total.tolist() == [[6.0, 8.0]]
    assert normed[0].tolist() == pytest.approx([6 / 50**0.5, 8 / 50**0.5], rel=1e-4)
    assert Plain().gate(torch.tensor([[0.0, 1.0, 5.0, 3.0]]))[0].tolist() == pytest.approx(
        [0.0, 3 / (1 + 2.718281828**-1)]
    )
