"""Tokenizers of many families, and the default model's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import DEFAULT_MODEL
from engine.text import ChatAssets, Codec
from tests.engine.text.tiny_tokenizers import Family, families


@pytest.fixture(scope="session")
def all_families() -> dict[str, Family]:
    return families()


@pytest.fixture(scope="session")
def codecs(all_families: dict[str, Family]) -> dict[str, Codec]:
    return {name: Codec(family.assets()) for name, family in all_families.items()}


@pytest.fixture(scope="session")
def default_assets(models_dir: Path) -> ChatAssets:
    from engine.weights import pull

    return ChatAssets.load(pull(DEFAULT_MODEL, models_dir))


@pytest.fixture(scope="session")
def default_codec(default_assets: ChatAssets) -> Codec:
    return Codec(default_assets)
