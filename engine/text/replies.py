"""Which ids a reply was sampled as, for clients that send only its text back."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from threading import Lock

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


class Trail:
    """A running digest of the ids of a prompt, so that every reply in it is looked up in constant time."""

    def __init__(self, namespace: str) -> None:
        name = namespace.encode()
        self._hash = blake2b(len(name).to_bytes(8, "little") + name, digest_size=16)

    def extend(self, ids: Ids) -> None:
        self._hash.update(np.ascontiguousarray(ids, dtype=np.int32).data)

    def key(self, text: str) -> bytes:
        """Identifies a reply with this text after the ids so far."""
        named = self._hash.copy()
        named.update(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest())
        return named.digest()


class ReplyMemory:
    """A bounded map from (namespace, ids before the reply, its text) to the sampled ids; the least used goes first.

    max_replies: entries; max_tokens: ids kept in all.
    """

    def __init__(self, *, max_replies: int = 4096, max_tokens: int = 1 << 20) -> None:
        self._max_replies, self._max_tokens = max_replies, max_tokens
        self._replies: OrderedDict[bytes, Ids] = OrderedDict()
        self._tokens = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._replies)

    def remember(self, namespace: str, prompt: Ids, ids: Ids, text: str) -> None:
        """Notes that `ids` were sampled after `prompt` (all its ids, the generation prompt too) and sent as `text`."""
        trail = Trail(namespace)
        trail.extend(prompt)
        key = trail.key(text)
        kept = np.array(ids, dtype=np.int32)
        kept.setflags(write=False)
        with self._lock:
            self._tokens += len(kept) - len(self._replies.pop(key, kept[:0]))
            self._replies[key] = kept
            while self._replies and (len(self._replies) > self._max_replies or self._tokens > self._max_tokens):
                self._tokens -= len(self._replies.popitem(last=False)[1])

    def find(self, trail: Trail, text: str) -> Ids | None:
        key = trail.key(text)
        with self._lock:
            if key not in self._replies:
                return None
            self._replies.move_to_end(key)
            return self._replies[key]
