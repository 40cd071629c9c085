"""What the tables of cases are written with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from cache import PrefixCache

Store = Callable[..., int]


@pytest.fixture
def store() -> Store:
    """store(cache, tokens, **acquire) runs a sequence from acquire to release and returns its cached tokens."""

    def run(cache: PrefixCache, tokens: Sequence[int], **acquire: object) -> int:
        lease = cache.acquire(tokens, **acquire)  # type: ignore[arg-type]
        lease.reserve(len(tokens))
        lease.commit(tokens)
        lease.release()
        return lease.cached_tokens

    return run
