"""Pages that rows begin with, read once for all of them: beside the same attention in one part, in float64 and by
whole engines."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine.attention import AttentionRow, KVShape, LayerAttention
from engine.attention.cascade import can_merge, requests_of
from engine.attention.fixed_decode import DecodeForm, FixedDecode
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.kv_scales import FP8, KVScales
from engine.attention.paged_kv import PagedKV
from engine.attention.torch_paged import TorchPagedAttention
from engine.devices import CpuDevice, Device
from engine.graphs import DecodeGraphs
from engine.models.decoder import Decoder
from engine.models.fused import FlashInferElementwise
from engine.weights import open_model
from tests.engine.conftest import StartEngine
from tests.engine.test_local_engine import assert_no_page_in_use, prompt
from tests.engine.two_turns import two_turns
from tests.support import flashinfer_standin
from tests.support.flashinfer_standin import Standin
from tests.support.flashinfer_standin.graphs import StandinGraphs
from tests.support.paged_rig import CPU, LAYERS, VOCABULARY, PagedRig
from tests.support.standin_device import StandinDevice, use_standin

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS = 6
FIXED = FixedDecode(batches=(4, 8), most_pages=700)
PLAIN = (LayerAttention(), LayerAttention(softcap=3.0), LayerAttention(scale=0.2))


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Standin:
    return flashinfer_standin.install(monkeypatch)


def rig_of(fixed: FixedDecode | None = FIXED, least_saved: int | None = 1, **options: Any) -> PagedRig:
    layers = options.get("layers", LAYERS)
    make = (
        lambda kv: FlashInferAttention(kv, layers, HEADS, fixed, least_saved),
        lambda kv: TorchPagedAttention(kv, layers),
    )
    return PagedRig(make, heads=HEADS, **{"num_pages": 800 // options["page_size"], **options})


def join(rig: PagedRig, common: int, length: int) -> int:
    """A text that begins with the first `common` tokens of the first one there is, and with no more of any other; all
    but its last 12 tokens are computed."""
    number = rig.add(length)
    text, first = rig.texts[number], next(iter(rig.texts.values()))
    if text is not first:
        text.tokens[:common] = first.tokens[:common]
        text.tokens[common] = (first.tokens[common] + number - 1) % VOCABULARY
    assert rig.start(number)
    rig.step({number: length - 12 - text.computed})
    return number


@pytest.mark.parametrize("layers", [LAYERS, PLAIN], ids=["windows in some", "no windows"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("fixed", [None, FIXED], ids=["as they come", "fixed"])
def test_rows_that_come_and_go(
    standin: Standin, fixed: FixedDecode | None, page_size: int, layers: tuple[LayerAttention, ...]
) -> None:
    """Many that share a prompt, forks, one that shares nothing, one with less than a page, and padding."""
    rig = rig_of(fixed, page_size=page_size, layers=layers)
    backend = rig.backends[0]
    padding = 1 if fixed is not None else 0
    a, b, c = join(rig, 0, 77), join(rig, 50, 90), join(rig, 50, 71)
    for _ in range(3):
        rig.step(dict.fromkeys((a, b, c), 1), padding=padding)
    assert standin.calls["merge"] > 1
    child = rig.fork(b)
    rig.step(dict.fromkeys((c, child, a, b), 1))
    if fixed is not None:
        assert backend.form == DecodeForm(4, shared=True)
    rig.drop(a)
    alone, short = rig.add(40), rig.add(9)
    for number in (alone, short):
        rig.texts[number].tokens[0] = VOCABULARY - 1 - rig.texts[number].tokens[0]
        assert rig.start(number)
    rig.step({alone: 30, child: 1, short: 1})
    grandchild = rig.fork(child)
    for _ in range(4):
        rig.step(dict.fromkeys((short, grandchild, b, alone, c, child), 1), padding=2 * padding)
    if fixed is not None:
        assert backend.form == DecodeForm(8, shared=True)
    rig.preempt(b)
    assert rig.start(b)
    if (left := len(rig.texts[b].tokens) - 3 - rig.texts[b].computed) > 0:
        rig.step({b: left})
    rig.step(dict.fromkeys((c, b), 1))


@pytest.mark.parametrize("seed", range(3))
def test_random_company(standin: Standin, seed: int) -> None:
    """A pool too small for all: evicted, preempted, resumed; random prefixes of random others."""
    rig = rig_of(page_size=4, num_pages=60, seed=seed)
    random, forms = rig.random, set()
    for _ in range(40):
        while len(rig.texts) < 6:
            rig.add(int(random.choice([20, 60])))
        for number, text in rig.texts.items():
            if text.lease is None:
                rig.start(number)
        left = {n: len(text.tokens) - text.computed for n, text in rig.texts.items() if text.lease is not None}
        prompts = {n: min(left[n] - 4, 16) for n in left if left[n] > 8 and rig.texts[n].computed < 12}
        if counts := rig.room_for(prompts or {n: 1 for n in left if left[n]}):
            padding = 0 if prompts else (4 - len(counts)) % 4
            rig.step(counts, padding=padding)
            forms.add(rig.backends[0].form)
        for number in [n for n in rig.texts if left.get(n) == 1 or random.random() < 0.05]:
            rig.drop(number)
        running = [n for n, text in rig.texts.items() if text.lease and 0 < text.computed < len(text.tokens)]
        if running and random.random() < 0.3 and rig.cache.usage.free > 2:
            rig.fork(int(random.choice(running)))
    assert DecodeForm(4, shared=True) in forms or DecodeForm(8, shared=True) in forms


def test_scales_of_8_bit_keys_and_values(standin: Standin) -> None:
    """Those of keys are in the logarithms of both parts, those of values in what both have attended to."""
    scales = KVScales((2.0, 0.25, 1.0), (0.25, 4.0, 2.0))
    rig = rig_of(page_size=4, layers=PLAIN, dtype=FP8, scales=scales, attend_dtype=torch.float32)
    first = join(rig, 0, 60)
    others = [join(rig, 36, 50) for _ in range(2)]
    before = standin.calls["merge"]
    for _ in range(3):
        rig.step(dict.fromkeys((first, *others), 1), padding=1)
    assert standin.calls["merge"] == before + 9


@pytest.mark.parametrize(
    ("least_saved", "layers", "merged"),
    [
        (1, (LayerAttention(),) * 2, True),
        (2 * 32 * 2 * 2 * 8 * 4, (LayerAttention(),) * 2, True),  # two rows' 32 tokens: keys and values of 2 heads of 8
        (2 * 32 * 2 * 2 * 8 * 4 + 1, (LayerAttention(),) * 2, False),
        (None, (LayerAttention(),) * 2, False),
        (1, (LayerAttention(window=400),) * 2, False),
    ],
)
def test_what_is_worth_it(
    standin: Standin, least_saved: int | None, layers: tuple[LayerAttention, ...], merged: bool
) -> None:
    """Three rows that share 32 tokens; what is not worth it is planned as if there were no such thing."""
    rig = rig_of(page_size=16, layers=layers, least_saved=least_saved)
    numbers = [join(rig, 0, 60), join(rig, 40, 60), join(rig, 40, 60)]
    standin.calls.clear()
    rig.step(dict.fromkeys(numbers, 1), padding=1)
    assert standin.calls == {
        "decode plan": 1,
        "decode run": 2,
        "append": 2,
        **({"shared plan": 1, "prefill run": 2, "merge": 2} if merged else {}),
    }
    assert rig.backends[0].form == DecodeForm(4, shared=merged)


def test_windows_do_not_share(standin: Standin) -> None:
    """Of five layers, three have no window; they are of two kinds."""
    rig = rig_of(page_size=16)
    numbers = [join(rig, 0, 60), join(rig, 40, 60)]
    standin.calls.clear()
    rig.step(dict.fromkeys(numbers, 1), padding=2)
    assert (standin.calls["decode plan"], standin.calls["shared plan"], standin.calls["merge"]) == (4, 2, 3)


@pytest.mark.parametrize("most_pages", [40, 8])
def test_more_pages_than_fixed_buffers_hold(standin: Standin, most_pages: int) -> None:
    """Steps that share pages are fewer pages than their tables have: 12 shared, and 2 of each row or more."""
    rig = rig_of(FixedDecode((4,), most_pages), page_size=4, layers=PLAIN)
    numbers = [join(rig, 0, 66), join(rig, 48, 66), join(rig, 48, 66), join(rig, 48, 66)]
    rig.step(dict.fromkeys(numbers, 1))
    assert rig.backends[0].form == (DecodeForm(4, shared=True) if most_pages == 40 else None)


def test_forms(standin: Standin) -> None:
    def forms(layers: tuple[LayerAttention, ...], most_pages: int = 64, least_saved: int | None = 1) -> list[str]:
        kv = PagedKV(KVShape(len(layers), 2, 8, 4, 4, torch.float32), CPU)
        return list(map(str, FlashInferAttention(kv, layers, 6, FixedDecode((1, 4), most_pages), least_saved).forms))

    both = ["1 sequences at a time", "4 sequences at a time"]
    assert forms(LAYERS) == [*both, "4 sequences at a time, what they share once"]
    assert forms((LayerAttention(window=9),)) == both
    assert forms(LAYERS, most_pages=7) == both
    assert forms(LAYERS, least_saved=None) == both


@pytest.mark.parametrize(
    ("heads", "head_dim", "can"),
    [(64, 128, True), (72, 128, False), (128, 64, True), (32, 256, True), (40, 256, False)],
)
def test_heads_that_the_kernel_merges(heads: int, head_dim: int, can: bool) -> None:
    assert can_merge(heads, head_dim) == can


def test_heads_that_cannot_be_merged_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    standin = flashinfer_standin.install(monkeypatch, exact=False)
    kv = PagedKV(KVShape(1, 8, 128, 4, 4, torch.bfloat16), CPU)
    assert FlashInferAttention(kv, None, 72, FixedDecode((4,), 64), 1).forms == (DecodeForm(4),)
    assert standin.calls["merge"] == 0


def test_requests() -> None:
    """Never more than rows: FlashInfer takes the longest to have rows - requests + 1."""
    assert [requests_of(rows) for rows in (2, 3, 4, 62, 64, 1000)] == [2, 2, 3, 32, 32, 32]


@pytest.fixture
def graphs(standin: Standin, tiny: tuple[Path, PreTrainedModel]) -> tuple[DecodeGraphs, Any, Any]:
    """Captured steps over a backend that shares, and two backends to compare with: that one, and one in one part."""
    converted = open_model(str(tiny[0]), tiny[0].parent / "converted-tiny", "float32")
    model = Decoder(converted.config, converted.tensors(), elementwise=FlashInferElementwise(torch.float32))
    spec = model.spec
    shape = spec.kv_shape(40, 4, torch.float32)
    shares, plain = (
        FlashInferAttention(PagedKV(shape, CPU), spec.layers, spec.num_heads, fixed, least)
        for fixed, least in ((FixedDecode((2, 4), 64), 1), (None, None))
    )
    captured = DecodeGraphs(model, shares, (2, 4), CPU)
    captured.capture(StandinGraphs(standin.stream))
    return captured, shares, (model, plain)


def test_replays_equal_steps_of_their_own(graphs: tuple[DecodeGraphs, Any, Any]) -> None:
    """Steps of each form in turn: what is shared, by whom and how much changes from one to the next."""
    captured, shares, (model, plain) = graphs
    prefix, random = np.arange(10, 16, dtype=np.int32), np.random.default_rng(0)
    tables = [np.concatenate((prefix, np.arange(16 + 4 * row, 20 + 4 * row, dtype=np.int32))) for row in range(4)]
    tables.append(np.arange(0, 10, dtype=np.int32))
    for backend in (shares, plain):  # all of the prefix by the first, then what each has for itself
        for row, start, count in [(0, 0, 26), *((row, 24, 2) for row in (1, 2, 3)), (4, 0, 5)]:
            tokens = torch.from_numpy(np.random.default_rng(row).integers(3, 250, count))
            backend.plan([AttentionRow(row, tables[row], start, count, 40)])
            with torch.inference_mode():
                model.forward(tokens, torch.arange(start, start + count), torch.tensor([count - 1]), backend)
    lengths, seen = {0: 26, 1: 26, 2: 26, 3: 26, 4: 5}, []
    for numbers in ([0, 1, 2, 3], [4, 2], [3, 4, 0], [1, 0], [4, 1, 3, 2], [4], [2, 3, 1]):
        rows = [AttentionRow(n, tables[n], lengths[n], 1, 40) for n in numbers]
        tokens = torch.from_numpy(random.integers(3, 250, len(numbers)))
        positions = torch.tensor([lengths[n] for n in numbers])
        assert captured.plan(rows)
        seen.append(shares.form)
        ours = captured.replay(tokens, positions)[: len(numbers)].clone()
        plain.plan(rows)
        with torch.inference_mode():
            theirs = model.forward(tokens, positions, torch.arange(len(numbers)), plain)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        for number in numbers:
            lengths[number] += 1
    assert [(form.rows, form.shared) for form in seen] == [
        *((4, True), (2, False), (4, True), (2, True), (4, True), (2, False), (4, True)),
    ]


@pytest.mark.parametrize(("page_size", "graphs"), [(1, True), (16, True), (16, False)])
async def test_every_token_is_the_same(
    page_size: int, graphs: bool, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions with one system prompt, two choices each and a second turn, in a pool that is too small for all."""
    texts: dict[str, list[list[int]]] = {}
    kinds = [{"seed": index, "temperature": 0.0 if index % 2 else 0.8} for index in range(5)]
    system = prompt(40, seed=99)
    histories = [np.concatenate((system, prompt(3 + 5 * index, seed=index))) for index in range(5)]
    device = use_standin(monkeypatch)
    shares = partial(FlashInferAttention, least_saved=1)
    monkeypatch.setattr("engine.attention.build.FlashInferAttention", shares)
    if not graphs:
        monkeypatch.setattr(StandinDevice, "graphs", lambda self: None)
    devices: dict[str, Device] = {"native": CpuDevice(), "flashinfer": device}
    for name, one in devices.items():
        monkeypatch.setattr("engine.loading.find_device", lambda wish, attention, one=one: one)
        engine = start_engine(
            page_size=page_size, pool_tokens=288, max_batched_tokens=24, max_running=6, context_length=160
        )
        texts[name] = await two_turns(engine, histories, kinds, max_tokens=30, min_tokens=30, ignore_eos=True)
        assert engine.snapshot().preemptions > 0
        assert engine.snapshot().counters["evicted_pages"] > 0
        assert_no_page_in_use(engine)
    assert texts["flashinfer"] == texts["native"]
    assert device.standin.calls["shared plan"] > 20
    assert len(device.maker.alive) == (7 if graphs else 0)
