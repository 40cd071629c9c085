"""Attention on a device beside attention spelled out in float64, over real leases (tests/support/paged_rig.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Literal

import torch
import torch.nn.functional as F

from engine.attention.base import AttentionBackend, LayerAttention
from engine.attention.fixed_decode import DecodeForm, FixedDecode
from engine.attention.flash_attn import FlashAttnAttention
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.kv_scales import FP8, KVScales
from engine.attention.paged_kv import PagedKV
from engine.attention.torch_paged import TorchPagedAttention
from engine.sampling.most_likely import SortedMostLikely, most_likely_by_flashinfer
from tests.gpu.budget import Budget
from tests.gpu.device import Device, Work
from tests.gpu.kernels import Variant, variants_of
from tests.gpu.operations import Fused, Operations, Plain
from tests.gpu.sampling import check_choices
from tests.support.paged_rig import VOCABULARY, Inputs, PagedRig

Outcome = Literal["passed", "failed", "left out"]
BackendName = Literal["flashinfer", "flash-attn", "torch-paged"]

PAGE_SIZES = (1, 16)
GROUPS = (1, 3, 4, 8)
PLAIN, WINDOW, CAPPED = LayerAttention(), LayerAttention(window=11, scale=0.2), LayerAttention(softcap=3.0)
BOTH, ITSELF = LayerAttention(window=40, softcap=5.0), LayerAttention(window=1)

SHARED = "shared pages once"
"""How the names of checks end in which rows share pages that are read once for all of them."""

_SECONDS = 5.0  # no check takes longer once its kernels are there
_ROWS = 4  # of steps with fixed buffers


@dataclass(frozen=True, slots=True)
class Kind:
    """What numbers are attended to, and how. kv: the dtype of keys and values, None: that of queries."""

    dtype: torch.dtype
    head_dim: int
    layers: tuple[LayerAttention, ...]
    kv: torch.dtype | None = None

    @property
    def name(self) -> str:
        dtype = _short(self.dtype) if self.kv is None else f"{_short(self.dtype)} over {_short(self.kv)}"
        return f"{dtype}, heads of {self.head_dim}"

    @property
    def variants(self) -> tuple[Variant, ...]:
        return tuple(variants_of(self.layers, self.dtype, self.head_dim, self.kv))


KINDS = (
    Kind(torch.bfloat16, 128, (PLAIN, WINDOW, CAPPED, BOTH, ITSELF)),
    Kind(torch.bfloat16, 64, (PLAIN, WINDOW)),
    Kind(torch.float16, 128, (PLAIN, CAPPED)),
    Kind(torch.float16, 64, (PLAIN, BOTH)),
    Kind(torch.bfloat16, 128, (PLAIN, WINDOW), FP8),
)
"""Each combination of dtype, head size, window and soft cap is a library that takes minutes to compile: not all are."""

VARIANTS = tuple(dict.fromkeys(variant for kind in KINDS for variant in kind.variants))


@dataclass(frozen=True, slots=True)
class Check:
    """needs: what of FlashInfer has to be compiled. run: raises where something is wrong."""

    name: str
    needs: frozenset[Variant | str]
    run: Work


@dataclass(frozen=True, slots=True)
class CheckResult:
    """detail: why it failed or was left out, one line."""

    name: str
    outcome: Outcome
    detail: str
    seconds: float


def run_checks(checks: Sequence[Check], budget: Budget, ready: frozenset[Variant | str] | None) -> list[CheckResult]:
    """ready: what is compiled; None: all."""
    return [_result(check, budget, ready) for check in checks]


def _result(check: Check, budget: Budget, ready: frozenset[Variant | str] | None) -> CheckResult:
    if ready is not None and not check.needs <= ready:
        return CheckResult(check.name, "left out", "its kernels were not compiled in time", 0.0)
    if not budget.holds(_SECONDS):
        return CheckResult(check.name, "left out", "no time left", 0.0)
    started = budget.spent
    try:
        check.run()
    except Exception as error:  # whatever it is, the other checks and the table are wanted
        return CheckResult(check.name, "failed", _one_line(error), budget.spent - started)
    return CheckResult(check.name, "passed", "", budget.spent - started)


def backends_there() -> tuple[BackendName, ...]:
    """What can be imported, the most important first."""
    packages: dict[BackendName, str] = {"flashinfer": "flashinfer", "flash-attn": "flash_attn"}
    found = [name for name, package in packages.items() if find_spec(package) is not None]
    return (*found, "torch-paged")


def all_checks(device: Device, backends: Sequence[BackendName], kinds: Sequence[Kind] = KINDS) -> list[Check]:
    """Those of FlashInfer first: it is what the card is for."""
    flashinfer = "flashinfer" in backends
    of_attention = [check for backend in backends for check in _checks_of(device, backend, kinds, flashinfer)]
    return [*of_attention, *_checks_of_sampling(device, flashinfer)]


def _checks_of_sampling(device: Device, flashinfer: bool) -> Iterator[Check]:
    yield Check("sampling: by sorting", frozenset(), lambda: check_choices(device, SortedMostLikely()))
    if flashinfer:
        needs = frozenset({"topk"})
        yield Check("sampling: by selection", needs, lambda: check_choices(device, most_likely_by_flashinfer()))


def _checks_of(device: Device, backend: BackendName, kinds: Sequence[Kind], flashinfer: bool) -> Iterator[Check]:
    if backend == "flashinfer" and device.torch.type == "cuda":
        for library, check in OPERATIONS.items():
            yield Check(f"flashinfer: {library}", frozenset({library}), partial(check, device, Fused))
    for kind, page_size, group in product(kinds, PAGE_SIZES, GROUPS):
        if backend == "flash-attn" and kind.kv is not None:
            continue
        name = f"{backend}: {kind.name}, groups of {group}, pages of {page_size}"
        uses = flashinfer and backend != "torch-paged"
        needs: frozenset[Variant | str] = frozenset((*kind.variants, "page")) if uses else frozenset()
        make = partial(_make, backend, kind, group, flashinfer)
        yield Check(name, needs, partial(check_company, device, make, kind, group, page_size))
        if backend == "flashinfer" and group == 4:
            run = partial(check_replay, device, make, kind, group, page_size)
            yield Check(f"{name}, replayed", needs, run)
            share = partial(_make, backend, kind, group, flashinfer, least_saved=1)
            run = partial(check_shared, device, share, kind, group, page_size)
            yield Check(f"{name}, {SHARED}", needs | {"cascade"}, run)


def _make(
    backend: BackendName, kind: Kind, group: int, flashinfer: bool, kv: PagedKV, least_saved: int | None = None
) -> AttentionBackend:
    """least_saved: as for FlashInferAttention."""
    heads, size = group * kv.shape.num_kv_heads, kv.shape.page_size
    if backend == "torch-paged":
        return TorchPagedAttention.quickest(kv, kind.layers)
    fixed = FixedDecode(batches=(_ROWS,), most_pages=_ROWS * 400 // size + _ROWS)
    decode: AttentionBackend = TorchPagedAttention.quickest(kv, kind.layers)
    if flashinfer:
        decode = FlashInferAttention(kv, kind.layers, heads, fixed, least_saved)
    return decode if backend == "flashinfer" else FlashAttnAttention(kv, kind.layers, decode)


def check_company(
    device: Device, make: Callable[[PagedKV], AttentionBackend], kind: Kind, group: int, page_size: int
) -> None:
    """Prompts, mixed steps, single ones with padding, a fork, and a sequence whose NaN other sequences inherit."""
    rig = _rig(device, make, kind, group, page_size)
    padding = hasattr(rig.backends[0], "padding")
    first, second, third = (rig.add(length) for length in (330, 140, 60))
    for number in (first, second, third):
        rig.texts[number].tokens[0] = number  # so that no two share a prefix
        rig.start(number)
    rig.step({first: 129, second: 16})
    rig.step({first: 130, second: 1, third: 15})
    for _ in range(2):
        rig.step({first: 1, second: 1, third: 1}, padding=1 if padding else 0)
    child = rig.fork(first)
    rig.step({first: 1, child: 20, second: 5})
    rig.step({second: 100, child: 1}, bad=second)
    rig.drop(second)
    heir = rig.add(120)
    rig.texts[heir].tokens[0] = heir
    rig.start(heir)
    rig.step({heir: 33, child: 1})
    for _ in range(2):
        rig.step({heir: 1, child: 1, first: 1}, padding=1 if padding else 0)
    if padding and rig.backends[0].form != DecodeForm(_ROWS):
        raise AssertionError("a step of four rows did not use its fixed buffers")


def check_replay(
    device: Device, make: Callable[[PagedKV], AttentionBackend], kind: Kind, group: int, page_size: int
) -> None:
    """A graph over a step of single tokens, replayed for longer texts, other rows and pages that others had."""
    rig = _rig(device, make, kind, group, page_size)
    replay = Replay(device, rig.backends[0])
    numbers = [rig.add(length) for length in (300, 200, 60)]
    for number in numbers:
        rig.texts[number].tokens[0] = number
        rig.start(number)
    first, second, third = numbers
    rig.step({first: 3, second: 15, third: 20})
    for _ in range(4):
        rig.step(dict.fromkeys(numbers, 1), padding=1, run=replay)
    rig.step({first: 250})
    rig.drop(third)
    child = rig.fork(first)
    rig.step({second: 150, child: 1})
    for _ in range(4):
        rig.step({child: 1, first: 1, second: 1}, padding=1, run=replay)
    rig.step({second: 1, child: 1}, padding=2, run=replay)


def check_shared(
    device: Device, make: Callable[[PagedKV], AttentionBackend], kind: Kind, group: int, page_size: int
) -> None:
    """Rows that begin with the same pages, two by two or all, beside one that does not, in steps with and without fixed
    buffers, and replayed."""
    rig = _rig(device, make, kind, group, page_size)
    replay = Replay(device, rig.backends[0])
    first, second, alone = (rig.add(length) for length in (300, 260, 90))
    rig.texts[first].tokens[0], rig.texts[alone].tokens[0] = first, alone
    rig.texts[second].tokens[:150] = rig.texts[first].tokens[:150]
    rig.texts[second].tokens[150] = (rig.texts[first].tokens[150] + 1) % VOCABULARY
    rig.start(first)
    rig.step({first: 200})
    rig.start(second)
    rig.start(alone)
    rig.step({second: 180 - rig.texts[second].computed, alone: 20})
    child = rig.fork(second)
    for numbers in ((child, alone, first), (second, first, child)):
        rig.step(dict.fromkeys(numbers, 1), padding=1)
        rig.step(dict.fromkeys(numbers, 1))
    for numbers in ((alone, child, first), (first, second, child), (second, alone, child), (first, child, second)):
        rig.step(dict.fromkeys(numbers, 1), padding=1, run=replay)
        if rig.backends[0].form != DecodeForm(_ROWS, shared=True):
            raise AssertionError("a step of rows that share pages was planned as if they did not")


class Replay:
    """Runs all layers of a step by one graph, captured at the first one."""

    def __init__(self, device: Device, backend: AttentionBackend) -> None:
        self._device = device
        self._backend = backend
        self._inputs: list[Inputs] = []
        self._outputs: list[torch.Tensor] = []
        self._replay: Work | None = None

    def __call__(self, inputs: Sequence[Inputs]) -> list[torch.Tensor]:
        if self._replay is None:
            self._inputs = [(q.clone(), k.clone(), v.clone()) for q, k, v in inputs]
            self._replay = self._device.capture(self._run)
        for kept, given in zip(self._inputs, inputs, strict=True):
            for target, source in zip(kept, given, strict=True):
                target.copy_(source)
        self._replay()
        return self._outputs

    def _run(self) -> None:
        self._outputs = [self._backend.run(layer, *given) for layer, given in enumerate(self._inputs)]


def check_norms(device: Device, make: Callable[[], Operations]) -> None:
    x, residual, weight = _random(device, 7, 4096), _random(device, 7, 4096), _random(device, 4096)
    _same((make().norm(x, weight), Plain().norm(x, weight)))
    given, wanted = (do.add_norm(x.clone(), residual.clone(), weight) for do in (make(), Plain()))
    _same(*zip(given, wanted, strict=True))


def check_rotation(device: Device, make: Callable[[], Operations]) -> None:
    """Of views into one tensor, as a product gives them."""
    q, k = _random(device, 7, 40, 128).split((32, 8), dim=1)
    positions = torch.arange(3, 10, dtype=torch.int32, device=device.torch)
    _same(*zip(make().rotate(q, k, positions), Plain().rotate(q, k, positions), strict=True))


def check_gate(device: Device, make: Callable[[], Operations]) -> None:
    x = _random(device, 7, 4096)
    _same((make().gate(x), Plain().gate(x)))


OPERATIONS = {"norm": check_norms, "rope": check_rotation, "silu_and_mul": check_gate}
"""By the libraries that they need."""


def _same(*pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    for given, wanted in pairs:
        torch.testing.assert_close(given, wanted, rtol=3e-2, atol=3e-2)


def _random(device: Device, *sizes: int) -> torch.Tensor:
    return F.normalize(torch.randn(sizes, device=device.torch), dim=-1).mul_(sizes[-1] ** 0.5).to(torch.bfloat16)


def _rig(
    device: Device, make: Callable[[PagedKV], AttentionBackend], kind: Kind, group: int, page_size: int
) -> PagedRig:
    scales = KVScales((2.0,) * len(kind.layers), (0.25,) * len(kind.layers)) if kind.kv is not None else None
    return PagedRig(
        [make],
        page_size=page_size,
        heads=2 * group,
        head_dim=kind.head_dim,
        num_pages=800 // page_size,
        dtype=kind.kv if kind.kv is not None else kind.dtype,
        layers=kind.layers,
        device=device.torch,
        scales=scales,
        attend_dtype=kind.dtype,
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
