"""How many tokens the pool of keys and values holds: arithmetic alone, in bytes and tokens."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ModelError, OutOfDeviceMemory

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes for keys and values. usual: unless told otherwise, and then for so many contexts at most (None: any
    number). most: what there is."""

    usual: int
    most: int
    contexts: int | None = None


def host_room(memory: int) -> Room:
    """A quarter of the machine's memory, 8 contexts at most: others live there too."""
    return Room(memory // 4, memory, 8)


def device_room(total: int, used: int, utilization: float) -> Room:
    """What `used` leaves of the share of a card that may be in use.

        0         used            utilization * total   total
        |----------|<--- usual --->|                      |
                   |<--------------- most --------------->|

    used: by weights, by the numbers of the largest step, and by other processes. Raises OutOfDeviceMemory if nothing is
    left.
    """
    usual = int(total * utilization) - used
    if usual <= 0:
        raise OutOfDeviceMemory(
            f"{used / _GIB:.1f} GiB of {total / _GIB:.1f} are in use before there is room for keys and values, and "
            f"gpu_memory_utilization = {utilization:g} allows {total * utilization / _GIB:.1f}"
        )
    return Room(usual, total - used)


def pool_pages(asked: int | None, room: Room, context: int, page_size: int, token_bytes: int) -> int:
    """Pages of the pool. asked: its tokens, which win over what is usual. token_bytes: what one takes.

    Raises ModelError for a pool that does not fit, or that holds no page.
    """
    usual = room.usual // token_bytes
    if room.contexts is not None:
        usual = min(usual, room.contexts * context)
    tokens = usual if asked is None else asked
    if tokens * token_bytes > room.most:
        needed, there = tokens * token_bytes / _GIB, room.most / _GIB
        raise ModelError(
            f"a pool of {tokens} tokens takes {needed:.1f} GiB, and this machine has {there:.1f} for it: lower it"
        )
    if tokens < page_size:
        raise ModelError(f"a pool of {tokens} tokens holds no page of {page_size} tokens")
    return tokens // page_size


def spread(tokens: int, sequences: int, context: int) -> list[int]:
    """The lengths of prompts that make up the largest step, of so many tokens and sequences, none longer than
    `context`."""
    sequences = min(sequences, tokens)
    each, more = divmod(tokens, sequences)
    return [min(context, each + (index < more)) for index in range(sequences)]
