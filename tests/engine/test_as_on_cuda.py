"""Steps on a card that there is not: no tensor of the wrong place, and nothing for which the host waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from engine.config import AdapterSource
from engine.devices import CpuDevice, CudaDevice
from tests.engine.conftest import StartEngine
from tests.engine.test_overlap import KINDS, OPTIONS, ask_all, on, overlapped
from tests.support import narrow_standin
from tests.support.as_on_cuda import CARD, AsOnCuda, OnCard, Waits, use_card, waiting
from tests.support.tiny_adapters import ALL, layers_of, random_tensors, save_adapter

REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "read": lambda x: x.tolist(),
    "number": lambda x: float(x.sum()),
    "truth": lambda x: bool(x.any()),
    "mask": lambda x: x[x > 0],
    "places": lambda x: x.nonzero(),
    "fetched": lambda x: x.cpu(),
    "sent": lambda x: torch.arange(3).to(x.device),
    "index": lambda x: x[torch.tensor([0])],
    "both places": lambda x: x + torch.zeros(3),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_mistakes_are_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_card(monkeypatch)
    with AsOnCuda(), torch.inference_mode(), pytest.raises((Waits, RuntimeError)):
        REFUSED[mistake](torch.ones(3, device=CARD))


@pytest.fixture(scope="module")
def adapters(tiny: tuple[Path, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> tuple[AdapterSource, ...]:
    folder = tmp_path_factory.mktemp("adapters")
    ranks = dict.fromkeys(layers_of(tiny[1], *ALL), 4)
    return tuple(
        AdapterSource(name, save_adapter(folder / name, random_tensors(tiny[1], ranks, seed=seed)))
        for seed, name in enumerate(("ann", "bob"))
    )


async def test_rows_of_several_adapters(
    adapters: tuple[AdapterSource, ...], start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_card(monkeypatch)
    kinds: list[dict[str, Any]] = [
        {**kind, "adapter": ("ann", "bob", None)[index % 3], "max_tokens": 12} for index, kind in enumerate(KINDS)
    ]
    on(CudaDevice(CARD, "torch", frozenset(), "as on a card"), monkeypatch)
    with AsOnCuda(), waiting():
        ours = start_engine(adapters=adapters, **OPTIONS)
    assert isinstance(ours._stepper._runner._attention._kv._kv, OnCard)  # type: ignore[attr-defined]
    found = await ask_all(ours, kinds, ignore_eos=True)
    assert overlapped(ours) > 5
    on(CpuDevice(), monkeypatch)
    theirs = start_engine(adapters=adapters, speculation="off", **OPTIONS)
    assert found == await ask_all(theirs, kinds, ignore_eos=True)


@pytest.mark.parametrize(
    "options",
    [{"dtype": "bfloat16"}, {"dtype": "int8"}, {"dtype": "fp8"}, {"dtype": "bfloat16", "kv_dtype": "fp8"}],
    ids=str,
)
async def test_narrow_types(
    options: dict[str, str], start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_card(monkeypatch)
    calls = narrow_standin.install(monkeypatch)
    monkeypatch.setattr(torch, "_int_mm", on_the_card(torch._int_mm))
    monkeypatch.setattr(F, "scaled_mm", on_the_card(F.scaled_mm))
    on(CudaDevice(CARD, "torch", frozenset(), "as on a card"), monkeypatch)
    with AsOnCuda(), waiting():
        engine = start_engine(**OPTIONS, **options)
    calls.clear()
    await ask_all(engine, KINDS, ignore_eos=True, max_tokens=8)
    assert overlapped(engine) > 5
    assert set(calls) == {options["dtype"]} - {"bfloat16"}


def on_the_card(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def checked(*arguments: Any, **options: Any) -> torch.Tensor:
        assert all(isinstance(x, OnCard) for x in arguments if isinstance(x, torch.Tensor))
        return OnCard(product(*(x.held if isinstance(x, OnCard) else x for x in arguments), **options))

    return checked
