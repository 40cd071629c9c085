"""The checks themselves, on the CPU over the stand-ins: they pass where all is well, and see what is not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from engine.attention import flashinfer_layers
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.kv_scales import FP8
from engine.attention.paged_kv import PagedKV
from engine.sampling.most_likely import SortedMostLikely
from tests.gpu.budget import Budget
from tests.gpu.checks import (
    BOTH,
    CAPPED,
    GROUPS,
    ITSELF,
    KINDS,
    OPERATIONS,
    PAGE_SIZES,
    PLAIN,
    VARIANTS,
    WINDOW,
    BackendName,
    Check,
    CheckResult,
    Kind,
    all_checks,
    run_checks,
)
from tests.gpu.device import Host
from tests.gpu.kernels import Variant, variants_of
from tests.gpu.operations import Plain
from tests.gpu.products import narrow_types, product_checks, short
from tests.gpu.sampling import check_choices
from tests.support import flash_attn_standin, flashinfer_standin
from tests.support.flashinfer_standin import Standin

pytestmark = pytest.mark.usefixtures("one_thread")

BACKENDS: tuple[BackendName, ...] = ("flashinfer", "flash-attn", "torch-paged")
SMALL = Kind(torch.bfloat16, 64, (PLAIN, WINDOW, CAPPED, BOTH, ITSELF))
SMALL_FP8 = Kind(torch.float16, 64, (PLAIN, BOTH), FP8)


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Standin:
    """With the kernels of the real one alone."""
    standin = flashinfer_standin.install(monkeypatch, exact=False)
    flash_attn_standin.install(monkeypatch, standin)
    return standin


def plenty(seconds: float = 1e9) -> Budget:
    return Budget.begin(seconds, lambda: 0.0)


def results(kinds: Sequence[Kind], name: str = "", backends: Sequence[BackendName] = BACKENDS) -> list[CheckResult]:
    return run_checks([check for check in all_checks(Host(), backends, kinds) if name in check.name], plenty(), None)


def failures(found: Sequence[CheckResult]) -> list[str]:
    assert found
    return [f"{check.name}: {check.detail}" for check in found if check.outcome != "passed"]


@pytest.mark.parametrize("name", ["groups of 4, pages of 16", "groups of 3, pages of 1"])
def test_all_is_well(standin: Standin, name: str) -> None:
    assert failures(results([SMALL, SMALL_FP8], name)) == []
    assert standin.calls["decode run"] > 0 < standin.calls["prefill run"]


WAYS = [f"groups of {group}, pages of {page_size}" for page_size, group in product(PAGE_SIZES, GROUPS)]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(KINDS)), ids=[kind.name for kind in KINDS])
def test_all_kinds_are_well(standin: Standin, number: int) -> None:
    """The kinds share the ways: all of both are there, and all that is replayed."""
    for way in (*WAYS[number :: len(KINDS)], "replayed"):
        assert failures(results([KINDS[number]], way)) == []


def test_names_tell_what_is_checked(standin: Standin) -> None:
    names = [check.name for check in all_checks(Host(), BACKENDS, [SMALL_FP8, SMALL])]
    assert len(set(names)) == len(names)
    assert names[0] == "flashinfer: float16 over float8_e4m3fn, heads of 64, groups of 1, pages of 1"
    assert sum(name.startswith("flashinfer") for name in names) == 2 * 2 * 4 + 2 * 2 * 2
    assert sum(name.startswith("flash-attn") for name in names) == 2 * 4, "flash-attn has no 8-bit keys"
    assert sum("replayed" in name for name in names) == sum("shared pages once" in name for name in names) == 2 * 2


def forgets_scales(patch: pytest.MonkeyPatch) -> None:
    right = FlashInferAttention._scales
    patch.setattr(FlashInferAttention, "_scales", lambda self, layer: dict.fromkeys(right(self, layer), 1.0))


def wide_window(patch: pytest.MonkeyPatch) -> None:
    right = flashinfer_layers.options_of
    patch.setattr(flashinfer_layers, "options_of", lambda layer, kv: _wider(right(layer, kv)))


def _wider(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "window_left": options["window_left"] + (options["window_left"] >= 0)}


def stale_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagedKV, "clear", lambda self, pages: None)


def no_tail_of_forks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagedKV, "copy_tail", lambda self, tail: None)


def no_fixed_buffers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FlashInferAttention, "form", None)


def shares_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FlashInferAttention, "_find_shared", lambda self, tables: None)


def merges_unevenly(patch: pytest.MonkeyPatch) -> None:
    """The second part is taken for the whole."""
    patch.setattr(Standin, "merge_state_in_place", lambda self, v, s, v_other, s_other: None)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (forgets_scales, "not close"),
        (wide_window, "not close"),
        (stale_pages, "not close"),
        (no_tail_of_forks, "not close"),
        (no_fixed_buffers, "did not use its fixed buffers"),
        (shares_nothing, "as if they did not"),
        (merges_unevenly, "not close"),
    ],
)
def test_a_mistake_is_seen(standin: Standin, monkeypatch: pytest.MonkeyPatch, mistake: Any, message: str) -> None:
    mistake(monkeypatch)
    found = results([SMALL_FP8], "groups of 4, pages of 16", ["flashinfer"])
    assert any(message in failure for failure in failures(found))


def test_a_graph_that_is_replayed_for_an_old_plan_is_seen(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was captured runs with the arrays of the step at which it was."""
    capture = Host.capture

    def frozen(self: Host, work: Any) -> Any:
        work()
        return lambda: None

    monkeypatch.setattr(Host, "capture", frozen)
    assert failures(results([SMALL], "groups of 4, pages of 16, replayed", ["flashinfer"]))
    monkeypatch.setattr(Host, "capture", capture)
    assert failures(results([SMALL], "groups of 4, pages of 16, replayed", ["flashinfer"])) == []


def test_what_has_no_time_or_no_kernels_is_left_out() -> None:
    def never() -> None:
        raise AssertionError("it ran")

    needed = Variant(torch.bfloat16, 128)
    checks = [Check("with", frozenset({needed}), never), Check("without", frozenset(), lambda: None)]
    assert [r.outcome for r in run_checks(checks, plenty(), frozenset())] == ["left out", "passed"]
    assert [r.outcome for r in run_checks(checks, plenty(), frozenset({needed}))] == ["failed", "passed"]
    late = run_checks(checks, plenty(0.0), None)
    assert [(r.outcome, r.detail) for r in late] == [("left out", "no time left")] * 2


class Wrong(Plain):
    """A norm without weights, a place too far, and the second half gates the first."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().norm(x, torch.ones_like(weight))

    def rotate(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().rotate(q, k, positions + 1)

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        return super().gate(x.roll(x.shape[-1] // 2, -1))


@pytest.mark.parametrize("check", OPERATIONS.values(), ids=OPERATIONS)
def test_small_operations(check: Any) -> None:
    check(Host(), Plain)
    with pytest.raises(AssertionError, match="not close"):
        check(Host(), Wrong)


def test_products_of_eight_bits() -> None:
    checks = list(product_checks(Host()))
    assert [(check.name, check.needs) for check in checks] == [
        (f"products: {narrow} weights, {given}", frozenset())
        for narrow in ("int8", "fp8")
        for given in ("bfloat16", "float16")
    ]
    assert failures(run_checks(checks, plenty(), None)) == []


def low_half_lost(patch: pytest.MonkeyPatch) -> None:
    right = torch._int_mm
    patch.setattr(torch, "_int_mm", lambda a, b: right(torch.cat((a[: len(a) // 2], 0 * a[len(a) // 2 :])), b))


def wrong_scale(patch: pytest.MonkeyPatch) -> None:
    right = torch.nn.functional.scaled_mm
    patch.setattr(torch.nn.functional, "scaled_mm", lambda a, b, s, *rest, **how: right(a, b, 1.1 * s, *rest, **how))


@pytest.mark.parametrize(("mistake", "kind"), [(low_half_lost, "int8"), (wrong_scale, "fp8")])
def test_a_wrong_product_is_seen(monkeypatch: pytest.MonkeyPatch, mistake: Any, kind: str) -> None:
    mistake(monkeypatch)
    found = run_checks([check for check in product_checks(Host()) if kind in check.name], plenty(), None)
    assert len(failures(found)) == 2
    assert all("is not close" in failure or "are not the same" in failure for failure in failures(found))


def test_a_captured_step_that_keeps_its_first_rows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "capture", lambda self, work: (work(), lambda: None)[1])
    assert len(failures(run_checks(list(product_checks(Host())), plenty(), None))) == 4


@pytest.mark.parametrize(("capability", "kinds"), [((8, 6), ["int8"]), ((8, 9), ["int8", "fp8"])])
def test_what_a_card_multiplies(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kinds: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    card = Host(torch=torch.device("cuda", 0))
    assert [short(dtype) for dtype in narrow_types(card)] == kinds


def test_libraries_that_are_compiled() -> None:
    assert variants_of((PLAIN, WINDOW, ITSELF, PLAIN), torch.float16, 64) == [
        Variant(torch.float16, 64),
        Variant(torch.float16, 64, window=True),
    ]
    assert variants_of((BOTH,), torch.bfloat16, 128, FP8) == [Variant(torch.bfloat16, 128, True, True, FP8)]
    assert len(VARIANTS) == 4 + 2 + 2 + 2 + 2
    assert Variant(torch.bfloat16, 128) in VARIANTS, "the model that is measured needs it"
    assert Variant(torch.bfloat16, 128, kv=FP8) in VARIANTS


class HighestIds:
    """Of equal logits it takes the last ones."""

    def __call__(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = logits.flip(-1).sort(dim=-1, descending=True, stable=True)
        return values[:, :k], logits.shape[1] - 1 - ids[:, :k]


def test_choices_are_compared() -> None:
    check_choices(Host(), SortedMostLikely(), vocabulary=3000, rows=12)
    with pytest.raises(AssertionError, match=r"equal logits, row \d+, .*: \d+, and the host takes \d+"):
        check_choices(Host(), HighestIds(), vocabulary=3000, rows=12)
