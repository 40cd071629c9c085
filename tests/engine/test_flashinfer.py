"""FlashInfer's backend on a stand-in, beside torch's over the same pages and attention spelled out in float64."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention import AttentionBackend, AttentionRow, CpuAttention, KVShape, LayerAttention
from engine.attention.cascade import LEAST_SAVED
from engine.attention.fixed_decode import DecodeForm, FixedDecode
from engine.attention.flashinfer import FlashInferAttention, unsupported
from engine.attention.paged_kv import PagedKV
from engine.attention.torch_paged import TorchPagedAttention
from engine.attention.workspace import workspace_bytes
from engine.errors import AttentionUnavailable
from engine.models.base import Model
from engine.models.decoder import Decoder
from engine.weights import open_model
from tests.support import flashinfer_standin
from tests.support.flashinfer_standin import Standin
from tests.support.paged_rig import CPU, LAYERS, VOCABULARY, PagedRig
from tests.support.tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Standin:
    return flashinfer_standin.install(monkeypatch)


def rig_of(
    heads: int, *, fixed: FixedDecode | None = None, least_saved: int | None = LEAST_SAVED, **options: Any
) -> PagedRig:
    """Both backends over pages, each with its own storage."""
    layers = options.get("layers", LAYERS)
    make = (
        lambda kv: FlashInferAttention(kv, layers, heads, fixed, least_saved),
        lambda kv: TorchPagedAttention(kv, layers),
    )
    return PagedRig(make, heads=heads, **options)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("seed", range(2))
def test_random_company(standin: Standin, page_size: int, group: int, seed: int) -> None:
    """Mixed batches, preemption, resuming from the cache, forks, eviction, and sequences that break."""
    pages = 400 // page_size
    rig = rig_of(2 * group, page_size=page_size, num_pages=pages, seed=seed)
    random, seen = rig.random, set()
    for _ in range(30):
        while len(rig.texts) < random.integers(2, 8):
            rig.add(int(random.choice([5, 40, 130])))
        for number, text in rig.texts.items():
            if text.lease is None:
                resumed = rig.start(number)
                seen.add("cached" if resumed and text.computed else "cold")
        counts = {}
        for number, text in rig.texts.items():
            left = len(text.tokens) - text.computed
            if text.lease is not None and left and random.random() < 0.8:
                counts[number] = min(left, int(random.choice([1, 1, 1, 2, 17, 64])))
        if counts := rig.room_for(counts):
            bad = int(random.choice(list(counts))) if random.random() < 0.1 else None
            rig.step(counts, bad=bad)
            seen.add("broken" if bad is not None else "mixed" if max(counts.values()) > 1 else "single")
            if bad is not None:
                rig.drop(bad)
        for number in [n for n in rig.texts if random.random() < 0.1]:
            rig.preempt(number) if random.random() < 0.5 else rig.drop(number)
        running = [n for n, text in rig.texts.items() if text.lease and 0 < text.computed < len(text.tokens)]
        if running and random.random() < 0.3 and rig.cache.usage.free > 1:
            rig.fork(int(random.choice(running)))
            seen.add("forked")
    assert seen >= {"cached", "cold", "broken", "mixed", "single", "forked"}
    assert standin.calls["append"] > 100


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 9, 12, 17])
def test_lengths_around_the_end_of_a_page(standin: Standin, page_size: int, length: int) -> None:
    rig = rig_of(6, page_size=page_size)
    number = rig.add(40)
    rig.start(number)
    rig.step({number: length})
    for _ in range(20):
        rig.step({number: 1})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_of_cards(standin: Standin, dtype: torch.dtype) -> None:
    """Queries, keys and values come in float32 and are attended to as they are kept."""
    rig = rig_of(6, page_size=4, dtype=dtype)
    first, second = rig.add(30), rig.add(50)
    rig.start(first)
    rig.start(second)
    outputs = rig.step({first: 29, second: 7})
    assert {output.dtype for output in outputs} == {dtype}
    rig.step({first: 1, second: 1})


def test_the_kernels_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_standin.install(monkeypatch, exact=False)
    rig = rig_of(6, page_size=4, head_dim=64, dtype=torch.bfloat16)
    number = rig.add(12)
    rig.start(number)
    rig.step({number: 11})
    rig.step({number: 1})
    monkeypatch.setattr("engine.attention.flashinfer.DTYPES", (torch.float32,))
    wrong = rig_of(6, page_size=4, head_dim=64, least_saved=None)
    with pytest.raises(AssertionError, match=r"no kernels for torch\.float32"):
        wrong.backends[0].plan([AttentionRow(0, np.zeros(1, np.int32), 0, 2, 2)])
    with pytest.raises(AssertionError, match=r"no kernels for torch\.float32"):
        rig_of(6, page_size=4, head_dim=64)


def test_planned_once_a_step_for_each_kind_of_layer(standin: Standin) -> None:
    layers = (*LAYERS, *LAYERS, LayerAttention(scale=8**-0.5))  # the last one's scale is what None stands for
    rig = rig_of(6, page_size=4, layers=layers)
    number = rig.add(30)
    rig.start(number)
    for _ in range(3):
        rig.step({number: 5})
    assert standin.calls == {"prefill plan": 3 * 4, "prefill run": 3 * 11, "append": 3 * 11, "merge": 1}
    rig.step({number: 1})
    assert standin.calls["decode plan"] == 4
    assert standin.calls["decode run"] == 11
    assert standin.calls["prefill plan"] == 3 * 4


def test_what_is_not_finite_stays_in_its_own_sequence(standin: Standin) -> None:
    """Also when it ends and its pages, with all that is in them, go to another."""
    rig = rig_of(6, page_size=16, num_pages=8)
    good, broken = rig.add(100), rig.add(20)
    assert rig.start(good)
    assert rig.start(broken)
    rig.step({good: 20, broken: 18}, bad=broken)
    rig.step({good: 1, broken: 1}, bad=broken)
    rig.drop(broken)
    rig.step({good: 70})
    later = rig.add(25)
    assert rig.start(later)
    rig.step({good: 1, later: 3})
    rig.step({good: 1, later: 1})


def test_guesses_that_were_not_kept_are_written_over(standin: Standin) -> None:
    rig = rig_of(6, page_size=4)
    number = rig.add(60)
    rig.start(number)
    text = rig.texts[number]
    rig.step({number: 6})
    for kept in (0, 1, 3):
        right = text.tokens.copy()
        first, last = text.computed + kept, text.computed + 4
        text.tokens[first:last] = (text.tokens[first:last] + 1) % VOCABULARY
        rig.step({number: 4}, keep=kept)
        text.tokens[:] = right
        rig.step({number: 1})


def test_a_fork_has_the_tail_and_nothing_behind_it(standin: Standin) -> None:
    rig = rig_of(6, page_size=16)
    number = rig.add(60)
    rig.start(number)
    rig.step({number: 21})
    child = rig.fork(number)
    tail = rig.texts[child].lease.tail_copy
    for store in rig.stores:
        assert not store.layer(0)[tail.dst, :, tail.n_tokens :].any()
    rig.step({number: 1, child: 1})
    rig.step({child: 13, number: 2})


def test_fixed_buffers_are_filled_up_with_rows_of_nobody(standin: Standin) -> None:
    """Three rows in buffers for four. A graph would read the same addresses in every step."""
    rig = rig_of(6, page_size=4, fixed=FixedDecode(batches=(1, 4), most_pages=64))
    backend = rig.backends[0]
    numbers = [rig.add(40) for _ in range(3)]
    for number in numbers:
        rig.start(number)
    rig.step(dict.fromkeys(numbers, 7))
    addresses = set()
    for _ in range(10):
        rig.step(dict.fromkeys(numbers, 1), padding=1)
        assert backend.form == DecodeForm(4)
        places = backend._layers[0].places
        addresses.add((places.pages.data_ptr(), places.page_offsets.data_ptr(), places.positions.data_ptr()))
    assert len(addresses) == 1
    rig.step({numbers[0]: 1})
    assert backend.form == DecodeForm(1)
    rig.step({numbers[0]: 1, numbers[1]: 1})
    assert backend.form is None


def test_more_pages_than_fixed_buffers_hold_go_to_others(standin: Standin) -> None:
    rig = rig_of(6, page_size=4, fixed=FixedDecode(batches=(1,), most_pages=2))
    backend = rig.backends[0]
    number = rig.add(40)
    rig.start(number)
    rig.step({number: 7})
    rig.step({number: 1})
    assert backend.form == DecodeForm(1)
    rig.step({number: 1})
    assert backend.form is None


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral, window": ("mistral", {"sliding_window": 10}),
    "qwen3, windows in some layers": (
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("model_type", "options"), MODELS.values(), ids=MODELS)
def test_a_decoder_gives_the_same_greedy_tokens(
    standin: Standin, model_type: str, options: dict[str, Any], page_size: int, tmp_path: Path
) -> None:
    save_tiny(tmp_path / "model", model_type, **options)
    converted = open_model(str(tmp_path / "model"), tmp_path / "models", "float32")
    model = Decoder(converted.config, converted.tensors())
    shape = model.spec.kv_shape(256 // page_size, page_size, torch.float32)
    heads = converted.config.num_heads
    on_cpu = greedy(model, CpuAttention(shape, model.spec.layers), page_size)
    assert greedy(model, FlashInferAttention(PagedKV(shape, CPU), model.spec.layers, heads), page_size) == on_cpu
    assert greedy(model, TorchPagedAttention(PagedKV(shape, CPU), model.spec.layers), page_size) == on_cpu


def greedy(model: Model, attention: AttentionBackend, page_size: int) -> list[list[int]]:
    """Three prompts, in chunks and beside each other's answers, and 25 tokens each."""
    random = np.random.default_rng(5)
    texts = [random.integers(3, 250, length).tolist() for length in (5, 23, 40)]
    tables = np.arange(3 * (80 // page_size), dtype=np.int32)[::-1].reshape(3, -1).copy()
    ends, computed = [len(text) + 25 for text in texts], [0, 0, 0]
    while any(len(text) < end for text, end in zip(texts, ends, strict=True)):
        running = [i for i in range(3) if len(texts[i]) < ends[i]]
        spans = {i: slice(computed[i], min(computed[i] + 16, len(texts[i]))) for i in running}
        counts = [span.stop - span.start for span in spans.values()]
        attention.plan([AttentionRow(i, tables[i], s.start, s.stop - s.start, 80) for i, s in spans.items()])
        tokens = torch.tensor([token for i, span in spans.items() for token in texts[i][span]])
        positions = torch.cat([torch.arange(span.start, span.stop) for span in spans.values()])
        with torch.inference_mode():
            logits = model.forward(tokens, positions, torch.tensor(counts).cumsum(0) - 1, attention)
        for i, choice in zip(running, logits.argmax(-1).tolist(), strict=True):
            computed[i] = spans[i].stop
            if computed[i] == len(texts[i]):
                texts[i].append(choice)
    return texts


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "a step without rows"),
        ([(np.arange(2, dtype=np.int32), 8, 0)], "no token"),
        ([(np.arange(2, dtype=np.int32), 8, 1)], "9 tokens need 3 pages, and sequence 0 has 2"),
        ([(np.empty(0, dtype=np.int32), 0, 1)], "1 tokens need 1 pages, and sequence 0 has 0"),
    ],
)
def test_rows_that_cannot_be_planned(standin: Standin, rows: list[Any], message: str) -> None:
    for backend in rig_of(6, page_size=4).backends:
        with pytest.raises(ValueError, match=message):
            backend.plan([AttentionRow(0, pages, start, count, 100) for pages, start, count in rows])
        with pytest.raises(RuntimeError, match="before its step was planned"):
            backend.run(0, *(torch.zeros(1, heads, 8) for heads in (6, 2, 2)))


def test_what_flashinfer_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(dtype: torch.dtype, head_dim: int = 64) -> FlashInferAttention:
        return FlashInferAttention(PagedKV(KVShape(1, 2, head_dim, 4, 4, dtype), CPU), None, 6)

    with pytest.raises(AttentionUnavailable, match=r"float32, only for torch.float16, torch.bfloat16, torch.float8"):
        backend(torch.float32)
    with pytest.raises(AttentionUnavailable, match="80 elements, only for 64, 128, 256"):
        backend(torch.bfloat16, head_dim=80)
    with pytest.raises(AttentionUnavailable, match=r"in torch\.int8"):
        backend(torch.int8)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(AttentionUnavailable, match="cannot be loaded"):
        backend(torch.bfloat16)
    assert unsupported(128, torch.bfloat16) is None


def test_heads_that_cannot_be_shared(standin: Standin) -> None:
    with pytest.raises(ValueError, match="5 query heads cannot share 2"):
        rig_of(5, page_size=4)


def test_the_workspace_is_what_splitting_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = PagedKV(KVShape(1, 1, 256, 1, 1, torch.bfloat16), CPU)
    assert workspace_bytes(kv, 8) == 128 << 20
    assert workspace_bytes(kv, 1024) == 2 * 1024 * 128 * 257 * 4
    few = PagedKV(KVShape(1, 8, 128, 1, 1, torch.bfloat16), CPU)
    assert workspace_bytes(few, 32, (1, 64)) == 128 << 20
    assert workspace_bytes(few, 32, (1, 512)) == 32 * (512 * 4 // 64 + 511) * 64 * 129 * 4
    monkeypatch.setattr("engine.attention.workspace._LEAST", 0)
    five_groups = 2 + 5  # tiles of 128 lines: what 130 lines fill, and one more for each further request of six
    assert workspace_bytes(few, 13 * 8, (10,)) == 13 * 8 * five_groups * 128 * 129 * 4


SIGNATURES = (
    "BatchPrefillWithPagedKVCacheWrapper.__init__",
    "BatchPrefillWithPagedKVCacheWrapper.plan",
    "BatchPrefillWithPagedKVCacheWrapper.run",
    "BatchDecodeWithPagedKVCacheWrapper.__init__",
    "BatchDecodeWithPagedKVCacheWrapper.plan",
    "BatchDecodeWithPagedKVCacheWrapper.run",
    "append_paged_kv_cache",
    "merge_state_in_place",
    "rmsnorm",
    "silu_and_mul",
    "apply_rope_with_cos_sin_cache_inplace",
)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_the_real_one(name: str) -> None:
    """The same names in the same order with the same defaults; what is optional may be by name alone."""
    real = parameters(attrgetter(name)(importlib.import_module("flashinfer")))
    ours = parameters(attrgetter(name)(Standin()))
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in real]
    for own, other in zip(ours, real, strict=True):
        assert own.kind in (other.kind, inspect.Parameter.KEYWORD_ONLY)


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
