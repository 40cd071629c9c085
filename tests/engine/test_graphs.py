"""Decoding by graphs, on stand-ins: what is captured, what a replay reads and writes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine.adapters import Adapters
from engine.attention import AttentionRow
from engine.attention.fixed_decode import FixedDecode
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.paged_kv import PagedKV
from engine.graphs import DecodeGraphs, batches_up_to
from engine.launched import Places
from engine.link import link_to
from engine.models.decoder import Decoder
from engine.models.fused import FlashInferElementwise
from engine.runner import ModelRunner, StepTokens
from engine.weights import open_model
from tests.engine.conftest import StartEngine
from tests.support import flashinfer_standin
from tests.support.flashinfer_standin import Standin
from tests.support.flashinfer_standin.graphs import StandinGraphs
from tests.support.standin_device import use_standin

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
PAGE_SIZE, PAGES, BATCHES = 4, 40, (1, 4)


@pytest.mark.parametrize(
    ("most", "batches"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
    ],
)
def test_batches(most: int, batches: tuple[int, ...]) -> None:
    assert batches_up_to(most) == batches


class Rig:
    """Twice the same small model over pages of its own: by graphs, and step by step. Sequence i has the pages from
    i * 8 on."""

    def __init__(self, folder: Path, models_dir: Path, standin: Standin, most_pages: int = 64) -> None:
        converted = open_model(str(folder), models_dir, "float32")
        self.model = Decoder(converted.config, converted.tensors(), elementwise=FlashInferElementwise(torch.float32))
        spec = self.model.spec
        shape = spec.kv_shape(PAGES, PAGE_SIZE, torch.float32)
        fixed = FixedDecode(BATCHES, most_pages)
        self.attention, self.plain = (
            FlashInferAttention(PagedKV(shape, CPU), spec.layers, spec.num_heads, each) for each in (fixed, None)
        )
        self.maker = StandinGraphs(standin.stream)
        self.graphs = DecodeGraphs(self.model, self.attention, BATCHES, CPU)
        self.runners = [
            ModelRunner(self.model, attention, Adapters(), spec.vocab_size, link_to(CPU), graphs)
            for attention, graphs in ((self.attention, self.graphs), (self.plain, None))
        ]
        self.lengths: dict[int, int] = {}

    def step(self, counts: dict[int, int], seed: int) -> list[torch.Tensor]:
        """Logits of the last token of each row, [R, vocab], of both."""
        random = np.random.default_rng(seed)
        rows, step = [], StepTokens()
        for number, count in counts.items():
            start = self.lengths.get(number, 0)
            pages = np.arange(number * 8, number * 8 + 8, dtype=np.int32)
            rows.append(AttentionRow(number, pages, start, count, 32))
            step.extend(random.integers(3, 250, count).tolist(), start, sampled=1)
            self.lengths[number] = start + count
        places = Places.of([None] * len(rows))
        with torch.inference_mode():
            launched = [runner._launch(rows, step, places, {}, None) for runner in self.runners]
        return [each.wait().logits.clone() for each in launched]


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Standin:
    return flashinfer_standin.install(monkeypatch)


@pytest.fixture
def rig(standin: Standin, tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> Rig:
    rig = Rig(tiny[0], tiny[0].parent / "converted-tiny", standin)
    rig.graphs.capture(rig.maker)
    return rig


def test_replays_equal_steps_of_their_own(rig: Rig, standin: Standin) -> None:
    """Rows that come and go, in batches that are filled up, beside prompts, longer than anything that was captured."""
    assert rig.maker.captured == len(rig.attention.forms) == 3
    compare(rig, {0: 9, 1: 1, 2: 5}, 0)
    forwards = count_forwards(rig)
    for seed, numbers in enumerate(([0, 1, 2], [2, 0], [1], [0], [0, 1, 2, 3], [3, 1, 2], [2]) * 3, start=1):
        compare(rig, dict.fromkeys(numbers, 1), seed)
    assert forwards == {"graphs": 0, "plain": 21}
    compare(rig, {0: 2, 1: 1}, 99)
    assert forwards == {"graphs": 1, "plain": 22}
    assert rig.maker.captured == len(rig.attention.forms) == 3


def compare(rig: Rig, counts: dict[int, int], seed: int) -> None:
    ours, theirs = rig.step(counts, seed)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def count_forwards(rig: Rig) -> dict[str, int]:
    """How often the model's code runs over each backend from now on."""
    counts, forward = {"graphs": 0, "plain": 0}, rig.model.forward

    def counted(tokens: Any, positions: Any, rows: Any, attention: Any) -> torch.Tensor:
        counts["graphs" if attention is rig.attention else "plain"] += 1
        return forward(tokens, positions, rows, attention)

    rig.model.forward = counted  # type: ignore[method-assign]
    return counts


def test_steps_that_fit_no_graph_run_as_they_are(rig: Rig) -> None:
    forwards = count_forwards(rig)
    compare(rig, {0: 3}, 0)
    compare(rig, dict.fromkeys(range(5), 1), 1)
    assert forwards == {"graphs": 2, "plain": 2}


def test_more_pages_than_there_are_buffers_for(standin: Standin, tiny: tuple[Path, PreTrainedModel]) -> None:
    rig = Rig(tiny[0], tiny[0].parent / "converted-tiny", standin, most_pages=4)
    rig.graphs.capture(rig.maker)
    compare(rig, {0: 16}, 0)
    forwards = count_forwards(rig)
    compare(rig, {0: 1}, 1)
    assert forwards == {"graphs": 1, "plain": 1}


def test_a_batch_without_buffers_is_refused(standin: Standin, tiny: tuple[Path, PreTrainedModel]) -> None:
    rig = Rig(tiny[0], tiny[0].parent / "converted-tiny", standin, most_pages=3)
    with pytest.raises(RuntimeError, match="no fixed buffers for 4 rows"):
        rig.graphs.capture(rig.maker)


def test_rows_that_fill_up_write_into_no_page_of_anybody(rig: Rig) -> None:
    compare(rig, {0: 9, 1: 6}, 0)
    store = rig.attention._kv
    before = [store.layer(index).clone() for index in range(3)]
    compare(rig, {0: 1, 1: 1}, 1)
    for index, kv in enumerate(before):
        changed = (store.layer(index) != kv).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) <= {2, 9, store.spare_page}


def test_a_replay_without_a_plan_is_refused(rig: Rig) -> None:
    tokens = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="not planned"):
        rig.graphs.replay(tokens, tokens)
    row = AttentionRow(0, np.zeros(1, np.int32), 0, 1, 4)
    assert rig.graphs.plan([row])
    rig.graphs.replay(tokens, tokens)
    with pytest.raises(RuntimeError, match="not planned"):
        rig.graphs.replay(tokens, tokens)
    assert rig.graphs.plan([row])
    rig.attention.plan([AttentionRow(0, np.zeros(1, np.int32), 0, 2, 4)])
    with pytest.raises(RuntimeError, match="not planned"):
        rig.graphs.replay(tokens, tokens)


def test_a_step_over_buffers_that_change_cannot_be_captured(rig: Rig) -> None:
    """Whoever captures a step without fixed buffers would replay the tables of that step for ever."""
    rig.attention.plan([AttentionRow(i, np.full(1, i, dtype=np.int32), 0, 1, 4) for i in range(3)])
    numbers = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(AssertionError, match="tables of another step"):
        rig.maker.capture(lambda: rig.model.forward(numbers, numbers, numbers, rig.attention))


def test_what_waits_for_the_device_cannot_be_captured(rig: Rig) -> None:
    with pytest.raises(AssertionError, match="waits for the device"):
        rig.maker.capture(lambda: torch.zeros(int(torch.ones(()).item())))
    with pytest.raises(AssertionError, match="captured"):
        rig.maker.capture(lambda: rig.attention.plan(rig.attention.padding(4)))  # type: ignore[arg-type, return-value]


def test_a_replay_reads_what_is_there_then(standin: Standin) -> None:
    x = torch.tensor([1.0, 2.0])
    graph = StandinGraphs(standin.stream).capture(lambda: (x * 2).add_(1).view(2, 1).sum(0))
    assert graph.output.tolist() == [8.0]
    x.copy_(torch.tensor([10.0, 20.0]))
    graph.replay()
    assert graph.output.tolist() == [62.0]


async def test_an_engine_captures_before_it_is_ready(
    monkeypatch: pytest.MonkeyPatch, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="engine")
    device = use_standin(monkeypatch)
    start_engine(max_running=5, pool_tokens=256)
    assert len(device.maker.alive) == 7
    told = [record.getMessage() for record in caplog.records if "captured" in record.getMessage()]
    assert told == ["decoding is captured for 1, 2, 4, 5 sequences at a time"] * 2  # in the trial, and for good
