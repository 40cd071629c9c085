"""How many tokens the pool holds, on a CPU and on a card; all figures in GiB where nothing else is said."""

from __future__ import annotations

import pytest

from engine.errors import ModelError, OutOfDeviceMemory
from engine.sizing import Room, device_room, host_room, pool_pages, spread

GIB = 2**30


@pytest.mark.parametrize(
    ("total", "used", "utilization", "usual", "most"),
    [
        (80, 20, 0.9, 52, 60),
        (80, 0, 1.0, 80, 80),
        (80, 71, 0.9, 1, 9),
        (10, 2, 0.5, 3, 8),
    ],
)
def test_the_room_on_a_card(total: int, used: int, utilization: float, usual: int, most: int) -> None:
    room = device_room(total * GIB, used * GIB, utilization)
    assert (round(room.usual / GIB, 6), room.most / GIB, room.contexts) == (usual, most, None)


def test_no_room_on_a_card() -> None:
    with pytest.raises(OutOfDeviceMemory) as raised:
        device_room(80 * GIB, 73 * GIB, 0.9)
    message = str(raised.value)
    assert "73.0 GiB of 80.0 are in use" in message
    assert "gpu_memory_utilization = 0.9 allows 72.0" in message
    for name in ("gpu_memory_utilization", "context_length", "max_batched_tokens", "dtype"):
        assert name in message.split("Lower ")[1]


@pytest.mark.parametrize(
    ("asked", "room", "pages"),
    [
        (None, Room(100_000, 1_000_000), 62),
        (None, Room(100_000, 1_000_000, contexts=8), 50),
        (None, Room(1_600, 1_000_000, contexts=8), 1),
        (160, Room(100_000, 1_000_000), 10),
        (175, Room(100_000, 1_000_000), 10),
        (10_000, Room(100_000, 1_000_000), 625),
        (16, Room(0, 1_600), 1),
    ],
)
def test_the_pool(asked: int | None, room: Room, pages: int) -> None:
    """Of pages of 16 tokens, each token in 100 bytes, with contexts of 100 tokens. What is asked for wins."""
    assert pool_pages(asked, room, context=100, page_size=16, token_bytes=100) == pages


@pytest.mark.parametrize(
    ("asked", "room", "message"),
    [
        (10_001, Room(100_000, 1_000_000), "a pool of 10001 tokens takes"),
        (15, Room(100_000, 1_000_000), "a pool of 15 tokens holds no page of 16 tokens"),
        (None, Room(1_500, 1_000_000), "a pool of 15 tokens holds no page of 16 tokens"),
    ],
)
def test_pools_that_cannot_be(asked: int | None, room: Room, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        pool_pages(asked, room, context=100, page_size=16, token_bytes=100)


def test_the_room_on_a_cpu() -> None:
    assert host_room(64) == Room(16, 64, 8)


@pytest.mark.parametrize(
    ("tokens", "sequences", "context", "lengths"),
    [
        (10, 3, 100, [4, 3, 3]),
        (2, 3, 100, [1, 1]),
        (256, 2, 100, [100, 100]),
        (16, 16, 1, [1] * 16),
    ],
)
def test_the_largest_step(tokens: int, sequences: int, context: int, lengths: list[int]) -> None:
    assert spread(tokens, sequences, context) == lengths
