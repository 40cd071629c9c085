"""Loads for the cache: a published trace, or conversations made up from a seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from cache import TokenIds, as_tokens
from chatd.failure import CommandFailed


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One turn: the prompt that is looked up, and the answer that is stored behind it."""

    prompt: TokenIds
    answer: TokenIds


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    """Requests of a trace in the format of Mooncake (FAST '25): a JSON object a line, with `hash_ids`.

    An id names a block of a prompt together with all blocks before it; here it becomes one token, so a page of one
    token stands for a block. Raises CommandFailed for a file that cannot be read as such.
    """
    nothing = np.empty(0, np.int32)
    try:
        with path.open(encoding="utf-8") as lines:
            requests = [Request(as_tokens(json.loads(line)["hash_ids"]), nothing) for line in islice(lines, limit)]
    except OSError as error:
        raise CommandFailed(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CommandFailed(f"{path} is no trace: every line must be a JSON object with hash_ids") from error
    if not requests:
        raise CommandFailed(f"{path} is empty")
    return requests


def make_conversations(conversations: int, turns: int, seed: int, active: int = 32) -> list[Request]:
    """Chats of up to `turns` turns behind one system prompt of 256 tokens; `active` of them take turns at random.

    A turn brings 16 to 255 tokens, its answer 32 to 511; after each turn one chat in four is over.
    """
    random = np.random.default_rng(seed)

    def text(length: int) -> TokenIds:
        return random.integers(0, 32_000, length, dtype=np.int32)

    system, requests = text(256), list[Request]()
    waiting, chats = conversations, list[tuple[TokenIds, int]]()
    while waiting or chats:
        while waiting and len(chats) < active:
            chats.append((system, 0))
            waiting -= 1
        history, turn = chats.pop(int(random.integers(len(chats))))
        prompt = np.concatenate((history, text(int(random.integers(16, 256)))))
        answer = text(int(random.integers(32, 512)))
        requests.append(Request(prompt, answer))
        if turn + 1 < turns and random.random() < 0.75:
            chats.append((np.concatenate((prompt, answer)), turn + 1))
    return requests


def shared_tokens(requests: Sequence[Request]) -> int:
    """How many tokens all prompts begin with."""
    if not requests:
        return 0
    shared = requests[0].prompt
    for request in requests:
        length = min(len(shared), len(request.prompt))
        differs = np.flatnonzero(shared[:length] != request.prompt[:length])
        shared = shared[: differs[0] if len(differs) else length]
    return len(shared)
