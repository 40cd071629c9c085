"""Mistakes that a GPU would not complain about, each made on purpose in FlashInfer's backend: all are seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention import AttentionRow
from engine.attention import flashinfer as module
from engine.attention.flashinfer import FixedDecode, FlashInferAttention
from engine.attention.paged_kv import PagedKV
from engine.attention.step_tables import StepTables
from engine.attention.transfers import Staged, Staging
from tests.support import flashinfer_standin
from tests.support.flashinfer_standin import Standin
from tests.support.paged_rig import LAYERS, PagedRig

pytestmark = pytest.mark.usefixtures("one_thread")

Patch = pytest.MonkeyPatch
HEADS = 6


@pytest.fixture
def standin(monkeypatch: Patch) -> Standin:
    return flashinfer_standin.install(monkeypatch)


def work() -> None:
    """Prompts, mixed and single steps with fixed buffers, a fork, and pages that go from one sequence to the next."""
    fixed = FixedDecode(batches=(4,), most_pages=64)
    rig = PagedRig(
        [lambda kv: FlashInferAttention(kv, LAYERS, HEADS, fixed)], page_size=4, heads=HEADS, num_pages=24, seed=1
    )
    first, second, third = (rig.add(40) for _ in range(3))
    for number in (third, first, second):
        rig.texts[number].tokens[0] = number  # so that no two share a prefix
        assert rig.start(number)
    rig.step({third: 14})
    rig.step({first: 8, second: 3})
    rig.step({first: 6, second: 1})
    for _ in range(3):
        rig.step({first: 1, second: 1}, padding=2)  # while the third, whose are the first pages, waits
    child = rig.fork(first)
    rig.step({first: 1, child: 1})
    rig.drop(second)
    for _ in range(4):
        rig.step({first: 1, child: 1}, padding=2)
    rig.step({third: 2, child: 1})


def test_without_a_mistake_all_is_well(standin: Standin) -> None:
    work()
    assert standin.calls["decode run"] > standin.calls["decode plan"] > 0


def tables(patch: Patch, change: Callable[[StepTables], StepTables]) -> None:
    build = StepTables.build
    patch.setattr(module, "StepTables", _Builder(lambda rows, page_size: change(build(rows, page_size))))


class _Builder:
    def __init__(self, build: Callable[[Sequence[AttentionRow], int], StepTables]) -> None:
        self.build = build


def arrays(patch: Patch, change: Callable[[Any], Any], method: str = "_plan_prefill") -> None:
    """What `plan` hands on to the wrappers and to `run` is changed."""
    planned = getattr(FlashInferAttention, method)
    patch.setattr(FlashInferAttention, method, lambda self, given: planned(self, change(given)))


def options(patch: Patch, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    right = module._options
    patch.setattr(module, "_options", lambda layer, dtype: change(right(layer, dtype)))


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: {key: value for key, value in given.items() if key != name}


def last_page_len_zero(patch: Patch, standin: Standin) -> None:
    tables(patch, lambda right: replace(right, last_page_len=right.last_page_len % 4))


def page_numbers_in_int64(patch: Patch, standin: Standin) -> None:
    arrays(patch, lambda a: a._replace(pages=Staged(a.pages.host.long(), a.pages.device.long())))


def positions_in_int64(patch: Patch, standin: Standin) -> None:
    arrays(patch, lambda a: a._replace(positions=Staged(a.positions.host, a.positions.device.long())))


def offsets_on_the_device(patch: Patch, standin: Standin) -> None:
    arrays(patch, lambda a: a._replace(page_offsets=Staged(a.page_offsets.device, a.page_offsets.device)))


def q_dtype_left_out(patch: Patch, standin: Standin) -> None:
    options(patch, without("q_data_type"))


def kv_dtype_left_out(patch: Patch, standin: Standin) -> None:
    options(patch, without("kv_data_type"))


def causal_left_out(patch: Patch, standin: Standin) -> None:
    wrapper = standin.BatchPrefillWithPagedKVCacheWrapper
    plan = wrapper.plan
    patch.setattr(wrapper, "plan", lambda self, *args, causal, **rest: plan(self, *args, **rest))


def window_counts_the_token(patch: Patch, standin: Standin) -> None:
    options(patch, lambda given: {**given, "window_left": given["window_left"] + (given["window_left"] >= 0)})


def scale_left_out(patch: Patch, standin: Standin) -> None:
    options(patch, without("sm_scale"))


def no_plan(patch: Patch, standin: Standin) -> None:
    """The kernels of the first kind of layers alone are planned."""
    planned = FlashInferAttention._plan_prefill

    def first_alone(self: FlashInferAttention, given: Any) -> Any:
        kinds, self._kinds = self._kinds, self._kinds[:1]
        try:
            return planned(self, given)
        finally:
            self._kinds = kinds

    patch.setattr(FlashInferAttention, "_plan_prefill", first_alone)


def replay_without_a_plan(patch: Patch, standin: Standin) -> None:
    """The buffers that a graph reads are written, and the kernels' own arrays are those of an earlier step."""
    planned = FlashInferAttention._plan_decode

    def buffers_alone(self: FlashInferAttention, given: Any) -> Any:
        places = self._fixed.get(len(given.last_page_len.host))
        if places is None or not places.page_offsets.any():
            return planned(self, given)
        places.page_offsets.copy_(given.page_offsets.device)
        places.last_page_len.copy_(given.last_page_len.device)
        places.pages[: len(given.pages.host)] = given.pages.device
        places.positions.copy_(given.positions.device)
        return module._Step(tuple(kind.fixed[4] for kind in self._kind_of_layer), places)

    patch.setattr(FlashInferAttention, "_plan_decode", buffers_alone)


def replay_of_the_last_step(patch: Patch, standin: Standin) -> None:
    """Nothing at all is written before the next step with fixed buffers."""
    plan = FlashInferAttention.plan

    def once(self: FlashInferAttention, rows: Sequence[AttentionRow]) -> None:
        if len(rows) != 4 or self._step is None or self._step.places is not self._fixed[4]:
            plan(self, rows)

    patch.setattr(FlashInferAttention, "plan", once)


def no_wait_for_the_last_copy(patch: Patch, standin: Standin) -> None:
    patch.setattr(standin.transfers, "fence", lambda: _Passed())


def no_wait_with_fresh_memory(patch: Patch, standin: Standin) -> None:
    """Our own arrays are safe, those of the wrappers are not."""
    step = Staging.step

    @contextmanager
    def elsewhere(self: Staging, given: Any) -> Any:
        self._host = self._transfers.host(len(self._host))
        with step(self, given) as staged:
            yield staged

    patch.setattr(Staging, "step", elsewhere)
    patch.setattr(standin.transfers, "fence", lambda: _Passed())


class _Passed:
    def wait(self) -> None:
        pass


def padding_into_a_page_of_the_step(patch: Patch, standin: Standin) -> None:
    plan = FlashInferAttention.plan

    def padded(self: FlashInferAttention, rows: list[AttentionRow]) -> None:
        plan(self, [row if row.sequence >= 0 else replace(row, pages=rows[0].pages) for row in rows])

    patch.setattr(FlashInferAttention, "plan", padded)


def padding_into_the_first_pages(patch: Patch, standin: Standin) -> None:
    """Which belong to a sequence that waits while others compute."""
    rows = [AttentionRow(-1 - index, np.array([index], dtype=np.int32), 0, 1, 1) for index in range(4)]
    patch.setattr(FlashInferAttention, "padding", lambda self, count: rows[:count])


def stale_page(patch: Patch, standin: Standin) -> None:
    patch.setattr(PagedKV, "clear", lambda self, pages: None)


def tail_of_a_fork_left_out(patch: Patch, standin: Standin) -> None:
    patch.setattr(PagedKV, "copy_tail", lambda self, tail: None)


def keys_in_another_dtype(patch: Patch, standin: Standin) -> None:
    """The real one copies them bit by bit, whatever they are."""
    append = standin.append_paged_kv_cache
    patch.setattr(standin, "append_paged_kv_cache", lambda k, v, *rest, **named: append(k.half(), v, *rest, **named))


def keys_at_the_place_before(patch: Patch, standin: Standin) -> None:
    tables(patch, lambda right: replace(right, positions=np.maximum(right.positions - 1, 0)))


def page_behind_the_pool(patch: Patch, standin: Standin) -> None:
    tables(patch, lambda right: replace(right, pages=right.pages + 25))


NUMBERS = "not close"
MISTAKES: list[tuple[Callable[[Patch, Standin], None], str]] = [
    (last_page_len_zero, "last_page_len has 0, below 1"),
    (page_numbers_in_int64, "indices has the dtype torch.int64"),
    (positions_in_int64, "positions has the dtype torch.int64"),
    (offsets_on_the_device, "indptr is not in host memory"),
    (q_dtype_left_out, "q_data_type was left to its default"),
    (kv_dtype_left_out, "kv_data_type was left to its default"),
    (causal_left_out, "causal was left out"),
    (window_counts_the_token, NUMBERS),
    (scale_left_out, "sm_scale None"),
    (no_plan, "run without a plan"),
    (replay_without_a_plan, "the buffers hold a step that was not planned"),
    (replay_of_the_last_step, NUMBERS),
    (no_wait_for_the_last_copy, "host memory was written while it was being copied from"),
    (no_wait_with_fresh_memory, "a plan before the copies of the last one have ended"),
    (padding_into_a_page_of_the_step, "which another row reads"),
    (padding_into_the_first_pages, NUMBERS),
    (stale_page, NUMBERS),
    (tail_of_a_fork_left_out, NUMBERS),
    (keys_in_another_dtype, "append_key has the dtype torch.float16"),
    (keys_at_the_place_before, "two tokens are written into one place"),
    (page_behind_the_pool, "above 24"),
]


@pytest.mark.parametrize(("seed", "message"), MISTAKES, ids=[seed.__name__ for seed, _ in MISTAKES])
def test_a_mistake_is_seen(
    standin: Standin, monkeypatch: Patch, seed: Callable[[Patch, Standin], None], message: str
) -> None:
    seed(monkeypatch, standin)
    with pytest.raises(AssertionError, match=message):
        work()


def test_stale_numbers_are_what_stale_pages_hold(standin: Standin, monkeypatch: Patch) -> None:
    """`stale_page` is seen because of NaN alone: with zeros in the pages it would do no harm."""
    stale_page(monkeypatch, standin)
    fill = torch.Tensor.fill_
    monkeypatch.setattr(torch.Tensor, "fill_", lambda self, value: fill(self, 0.0 if value != value else value))
    work()
