"""Mistakes that a GPU would not complain about, each made on purpose in FlashInfer's backend: all are seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention import AttentionRow, flashinfer_layers
from engine.attention import flashinfer as module
from engine.attention.cascade import LEAST_SAVED, Cascade
from engine.attention.fixed_decode import FixedDecode
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.flashinfer_layers import LayerKind, LayerPlan
from engine.attention.paged_kv import PagedKV
from engine.attention.shared_prefixes import SharedPrefixes
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


def work(least_saved: int | None = LEAST_SAVED) -> None:
    """Prompts, mixed and single steps with fixed buffers, a fork, and pages that go from one sequence to the next."""
    fixed = FixedDecode(batches=(4,), most_pages=64)
    rig = PagedRig(
        [lambda kv: FlashInferAttention(kv, LAYERS, HEADS, fixed, least_saved)],
        page_size=4,
        heads=HEADS,
        num_pages=24,
        seed=1,
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


def share() -> None:
    """Steps of single tokens whose rows share pages, in an order of their own, with others between, and a replay."""
    fixed = FixedDecode(batches=(4,), most_pages=64)
    rig = PagedRig(
        [lambda kv: FlashInferAttention(kv, LAYERS, HEADS, fixed, least_saved=1)],
        page_size=4,
        heads=HEADS,
        num_pages=40,
        seed=1,
    )
    first, alone = rig.add(40), rig.add(30)
    for number in (first, alone):
        rig.texts[number].tokens[0] = number
        assert rig.start(number)
    rig.step({first: 18, alone: 9})
    child = rig.fork(first)
    rig.step({first: 1, child: 1})
    rig.step({first: 3, child: 1})
    for _ in range(5):
        rig.step({child: 1, alone: 1, first: 1}, padding=1)
    rig.step({child: 1, first: 1}, padding=2)
    rig.step({alone: 1, first: 1, child: 1})


def test_without_a_mistake_all_is_well(standin: Standin) -> None:
    work()
    assert standin.calls["decode run"] > standin.calls["decode plan"] > 0
    work(least_saved=1)
    share()
    assert standin.calls["shared plan"] > 6


def tables(patch: Patch, change: Callable[[StepTables], StepTables]) -> None:
    build = StepTables.build
    patch.setattr(module, "StepTables", _Builder(lambda rows, page_size: change(build(rows, page_size))))


class _Builder:
    def __init__(self, build: Callable[[Sequence[AttentionRow], int], StepTables]) -> None:
        self.build = build


def arrays(patch: Patch, change: Callable[[Any], Any]) -> None:
    """What `plan` hands on to the wrappers and to `run` is changed, for prompts."""
    planned = LayerKind.plan_prefill
    patch.setattr(LayerKind, "plan_prefill", lambda self, given: planned(self, change(given)))


def options(patch: Patch, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    right = flashinfer_layers.options_of
    patch.setattr(flashinfer_layers, "options_of", lambda layer, kv: change(right(layer, kv)))


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
    """Only the kernels of layers without a window are planned."""
    wrapper = standin.BatchPrefillWithPagedKVCacheWrapper
    plan = wrapper.plan
    patch.setattr(wrapper, "plan", lambda *args, **rest: plan(*args, **rest) if rest["window_left"] < 0 else None)


def replay_without_a_plan(patch: Patch, standin: Standin) -> None:
    """The buffers that a graph reads are written, and the kernels' own arrays are those of an earlier step."""
    planned = LayerKind.plan_decode

    def buffers_alone(self: LayerKind, given: Any, form: Any) -> Any:
        if form is None or self._fixed[4]._plan is None:
            return planned(self, given, form)
        places = self._places[4]
        places.page_offsets.copy_(given.page_offsets.device)
        places.last_page_len.copy_(given.last_page_len.device)
        places.pages[: len(given.pages.host)] = given.pages.device
        return LayerPlan(self._fixed[4], places)

    patch.setattr(LayerKind, "plan_decode", buffers_alone)


def replay_of_the_last_step(patch: Patch, standin: Standin) -> None:
    """Nothing at all is written before the next step with fixed buffers."""
    plan = FlashInferAttention.plan

    def once(self: FlashInferAttention, rows: Sequence[AttentionRow]) -> None:
        if len(rows) != 4 or self.form is None:
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
    (causal_left_out, "what a window hides depends on how many rows share"),
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


def all_keys_of_some(patch: Patch, standin: Standin) -> None:
    """As if a row saw of the shared part only what is before it: causal is left on."""
    wrapper = standin.BatchPrefillWithPagedKVCacheWrapper
    plan = wrapper.plan
    patch.setattr(wrapper, "plan", lambda self, *args, causal, **rest: plan(self, *args, causal=True, **rest))


def limits(patch: Patch, change: Callable[[Any], Any]) -> None:
    """Groups are found by other tables than the step has."""
    find = SharedPrefixes.find.__func__  # type: ignore[attr-defined]

    def other(cls: Any, tables: StepTables, *rest: Any) -> Any:
        found = find(cls, change(tables), *rest)
        return replace(found, tables=tables) if found is not None else None

    patch.setattr(SharedPrefixes, "find", classmethod(other))


def a_shared_page_counted_twice(patch: Patch, standin: Standin) -> None:
    """The last shared page stays in the own part of each row, its positions being right."""
    own = SharedPrefixes._own

    def one_less(self: SharedPrefixes, *orders: Any) -> StepTables:
        fewer = tuple(replace(group, pages=group.pages - 1) for group in self.groups)
        return own(replace(self, groups=fewer), *orders)

    patch.setattr(SharedPrefixes, "_own", one_less)


def a_shared_page_left_out(patch: Patch, standin: Standin) -> None:
    shared = SharedPrefixes._shared

    def one_less(self: SharedPrefixes, *orders: Any) -> Any:
        fewer = tuple(replace(group, pages=group.pages - 1) for group in self.groups)
        return shared(replace(self, groups=fewer), *orders)

    patch.setattr(SharedPrefixes, "_shared", one_less)


def positions_of_the_whole(patch: Patch, standin: Standin) -> None:
    """The new token's place is counted from the beginning of its sequence, in tables that begin later."""
    own = SharedPrefixes._own
    patch.setattr(
        SharedPrefixes, "_own", lambda self, *orders: replace(own(self, *orders), positions=self.tables.positions)
    )


def a_page_that_is_still_written(patch: Patch, standin: Standin) -> None:
    """Counted as full before its last token is there; padding then has nothing of its own."""
    limits(patch, lambda tables: replace(tables, positions=tables.positions + 4))


def a_written_page_is_shared(patch: Patch, standin: Standin) -> None:
    """The first of a group reads its own last page as if all had it."""
    shared = SharedPrefixes._shared

    def more(self: SharedPrefixes, *orders: Any) -> Any:
        return shared(replace(self, groups=tuple(replace(g, pages=g.pages + 1) for g in self.groups)), *orders)

    patch.setattr(SharedPrefixes, "_shared", more)


def rows_in_their_own_order(patch: Patch, standin: Standin) -> None:
    """Queries are not brought into the order of the groups."""
    cascade(patch, lambda self: replace(self, order=self.order.sort().values))


def results_in_the_order_of_groups(patch: Patch, standin: Standin) -> None:
    cascade(patch, lambda self: replace(self, inverse=self.inverse.sort().values))


def tokens_in_the_order_of_groups(patch: Patch, standin: Standin) -> None:
    """New keys go to the tables of the rows with their number."""
    plan = LayerKind.plan_shared

    def unordered(self: LayerKind, *given: Any) -> LayerPlan:
        wrapper, places = plan(self, *given)
        return LayerPlan(wrapper, replace(places, token_rows=places.token_rows.sort().values))

    patch.setattr(LayerKind, "plan_shared", unordered)


def cascade(patch: Patch, change: Callable[[Cascade], Cascade]) -> None:
    run = Cascade.run
    patch.setattr(Cascade, "run", lambda self, q, kv, **scales: run(change(self), q, kv, **scales))


def merged_with_another_row(patch: Patch, standin: Standin) -> None:
    merging(patch, standin, lambda v, s: (v.roll(1, 0), s.roll(1, 0)))


def logarithms_to_base_e(patch: Patch, standin: Standin) -> None:
    """Of one part, as other kernels give them."""
    merging(patch, standin, lambda v, s: (v, s * math.log(2)))


def merging(patch: Patch, standin: Standin, change: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    merge = standin.merge_state_in_place
    patch.setattr(standin, "merge_state_in_place", lambda v, s, *others: merge(v, s, *change(*others)))


def halves_alike(patch: Patch, standin: Standin) -> None:
    """Both parts count the same, however many keys they have."""
    patch.setattr(standin, "merge_state_in_place", lambda v, s, v_other, s_other: v.add_(v_other).div_(2))


def soft_cap_of_one_part(patch: Patch, standin: Standin) -> None:
    wrapper = standin.BatchPrefillWithPagedKVCacheWrapper
    plan = wrapper.plan
    patch.setattr(
        wrapper,
        "plan",
        lambda self, *args, causal, logits_soft_cap, **rest: plan(
            self, *args, causal=causal, logits_soft_cap=logits_soft_cap if causal else 0.0, **rest
        ),
    )


def windows_share(patch: Patch, standin: Standin) -> None:
    """A layer with a window is computed in two parts as well."""
    init, shared_places = LayerKind.__init__, []

    def all_share(self: LayerKind, kernels: Any, layer: Any, places: Any, shared: Any) -> None:
        shared_places.append(shared)  # the first layer has no window
        init(self, kernels, layer, places, shared_places[0])

    patch.setattr(LayerKind, "__init__", all_share)


def requests_that_grow(patch: Patch, standin: Standin) -> None:
    """Fixed buffers get as many requests as a step happens to have."""
    right = SharedPrefixes.parts
    patch.setattr(SharedPrefixes, "parts", lambda self, requests=None: right(self))


SHARING: list[tuple[Callable[[Patch, Standin], None], str]] = [
    (all_keys_of_some, NUMBERS),
    (a_shared_page_counted_twice, NUMBERS),
    (a_shared_page_left_out, NUMBERS),
    (positions_of_the_whole, "a position behind the end of its sequence"),
    (a_page_that_is_still_written, "has an empty row"),
    (a_written_page_is_shared, "are shared, and written to in this step"),
    (rows_in_their_own_order, NUMBERS),
    (results_in_the_order_of_groups, NUMBERS),
    (tokens_in_the_order_of_groups, "a position"),
    (merged_with_another_row, NUMBERS),
    (logarithms_to_base_e, NUMBERS),
    (halves_alike, NUMBERS),
    (soft_cap_of_one_part, NUMBERS),
    (windows_share, "what a window hides"),
    (requests_that_grow, "requests in buffers for"),
]


@pytest.mark.parametrize(("seed", "message"), SHARING, ids=[seed.__name__ for seed, _ in SHARING])
def test_a_mistake_where_rows_share_is_seen(
    standin: Standin, monkeypatch: Patch, seed: Callable[[Patch, Standin], None], message: str
) -> None:
    seed(monkeypatch, standin)
    with pytest.raises(AssertionError, match=message):
        share()


def test_stale_numbers_are_what_stale_pages_hold(standin: Standin, monkeypatch: Patch) -> None:
    """`stale_page` is seen because of NaN alone: with zeros in the pages it would do no harm."""
    stale_page(monkeypatch, standin)
    fill = torch.Tensor.fill_
    monkeypatch.setattr(torch.Tensor, "fill_", lambda self, value: fill(self, 0.0 if value != value else value))
    work()
