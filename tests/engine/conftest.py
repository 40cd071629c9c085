"""A small random model, engines over it that end with the test, and the text side of the default model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.config import DEFAULT_MODEL, EngineConfig
from engine.devices import CpuDevice
from engine.loading import load_engine
from engine.local import LocalEngine
from engine.text import ChatAssets, Codec
from tests.support.generation import Reference
from tests.support.standin_device import use_standin
from tests.support.tiny_models import save_tiny

StartEngine = Callable[..., LocalEngine]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """The folder of a random Llama with a vocabulary of bytes, and the same model in transformers."""
    folder = tmp_path_factory.mktemp("tiny")
    return folder, save_tiny(folder, "llama")


@pytest.fixture(scope="session")
def reference(tiny: tuple[Path, PreTrainedModel]) -> Reference:
    return Reference(tiny[1])


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Products this small gain nothing from a second thread, and much is lost in waiting for it on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that are marked so run over every attention that there is for engines, or on the CPU and on the stand-in of
    a card."""
    if "attention" not in metafunc.fixturenames:
        return
    if metafunc.definition.get_closest_marker("every_attention"):
        metafunc.parametrize("attention", ("native", "torch", "flashinfer"), indirect=True)
    elif metafunc.definition.get_closest_marker("on_a_card"):
        metafunc.parametrize("attention", ("native", "flashinfer"), indirect=True)


@pytest.fixture
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What engines that are loaded from now on attend by; flashinfer is a stand-in, with graphs and all else that
    belongs to a card."""
    name: str = getattr(request, "param", "native")
    if name == "torch":
        monkeypatch.setattr("engine.loading.find_device", lambda wish, attention: CpuDevice("torch"))
    elif name == "flashinfer":
        use_standin(monkeypatch)
    return name


@pytest.fixture
async def start_engine(
    tiny: tuple[Path, PreTrainedModel], attention: str, one_thread: None
) -> AsyncIterator[StartEngine]:
    """Builds engines in float32 over the tiny model; options are those of EngineConfig."""
    engines: list[LocalEngine] = []
    models_dir = tiny[0].parent / "converted-tiny"

    def start(**options: Any) -> LocalEngine:
        config = EngineConfig(**{"model": str(tiny[0]), "models_dir": models_dir, "dtype": "float32", **options})
        engines.append(load_engine(config))
        return engines[-1]

    yield start
    for engine in engines:
        await engine.close()


@pytest.fixture(scope="session")
def default_assets(models_dir: Path) -> ChatAssets:
    from engine.weights import pull

    return ChatAssets.load(pull(DEFAULT_MODEL, models_dir))


@pytest.fixture(scope="session")
def default_codec(default_assets: ChatAssets) -> Codec:
    return Codec(default_assets)
