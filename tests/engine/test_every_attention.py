"""One workload over each attention that there is for engines: every token is the same."""

from __future__ import annotations

import pytest

from engine.devices import CpuDevice, Device
from tests.engine.conftest import StartEngine
from tests.engine.test_local_engine import assert_no_page_in_use, prompt
from tests.engine.two_turns import two_turns
from tests.support.standin_device import use_standin

pytestmark = pytest.mark.usefixtures("one_thread")

POOL = 288


@pytest.mark.parametrize("speculation", ["off", "ngram"])
@pytest.mark.parametrize("page_size", [1, 16])
async def test_every_token_is_the_same(
    page_size: int, speculation: str, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks beside answers, forks, preemption and eviction in a pool that is too small for all, and a
    second turn for each from what is left of the first."""
    texts: dict[str, list[list[int]]] = {}
    histories = [prompt(20 + 7 * index, seed=index) for index in range(6)]
    kinds = [{"seed": index, "temperature": 0.0 if index % 2 else 0.8} for index in range(6)]
    standin = use_standin(monkeypatch)
    devices: dict[str, Device] = {"native": CpuDevice(), "torch": CpuDevice("torch"), "flashinfer": standin}
    for name, device in devices.items():
        monkeypatch.setattr("engine.loading.find_device", lambda wish, attention, device=device: device)
        engine = start_engine(
            page_size=page_size,
            pool_tokens=POOL,
            max_batched_tokens=24,
            max_running=6,
            context_length=160,
            speculation=speculation,
        )
        texts[name] = await two_turns(engine, histories, kinds, max_tokens=30, min_tokens=30, ignore_eos=True)
        assert engine.snapshot().preemptions > 0
        assert engine.snapshot().counters["evicted_pages"] > 0
        assert_no_page_in_use(engine)
    assert texts["torch"] == texts["native"]
    assert texts["flashinfer"] == texts["native"]
    assert {"prefill run", "decode run", "append", "rmsnorm", "rope", "silu_and_mul"} <= standin.standin.calls.keys()
    assert len(standin.maker.alive) == 7
