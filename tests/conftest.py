"""Fixtures that every folder may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from engine.openmp import spin_briefly
from tests.support.server import ServerProcess

spin_briefly()  # before anything loads torch: beside other work on the same cores, tests take seconds, not minutes
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """Where fetched and converted models are kept, the same as for the server, so that they are made once."""
    if named := os.environ.get("CHATD_MODELS_DIR"):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "chatd" / "models"


@pytest.fixture(scope="session")
def server(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One real server with the default model, shared by all tests that leave it as it was."""
    process = ServerProcess(tmp_path_factory.mktemp("server"), models_dir, "--pool-tokens", "16384")
    yield process
    process.stop()


@pytest.fixture(scope="session")
def server_url(server: ServerProcess) -> str:
    return server.url
