"""Tokenizers of many families."""

from __future__ import annotations

import pytest

from engine.text import Codec
from tests.engine.text.tiny_tokenizers import Family, families


@pytest.fixture(scope="session")
def all_families() -> dict[str, Family]:
    return families()


@pytest.fixture(scope="session")
def codecs(all_families: dict[str, Family]) -> dict[str, Codec]:
    return {name: Codec(family.assets()) for name, family in all_families.items()}
