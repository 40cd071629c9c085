"""What sequences ask of the prefix cache."""

from __future__ import annotations

from cache import Lease, OutOfPages, PrefixCache
from engine.sequence import Sequence


class SequencePages:
    """One cache as the scheduler sees it. enabled False: every prompt is computed anew. Lengths in tokens."""

    def __init__(self, cache: PrefixCache, page_size: int, enabled: bool) -> None:
        self.page_size = page_size
        self._cache = cache
        self._enabled = enabled

    def shares(self, sequence: Sequence) -> bool:
        """Whether it looks up, and leaves behind, what is cached."""
        return self._enabled and sequence.request.use_cache

    def match(self, sequence: Sequence) -> int:
        """What admission would find now: whole pages, and never the last token."""
        if not self.shares(sequence):
            return 0
        found = self._cache.match_length(sequence.tokens[: sequence.num_tokens], sequence.cache_namespace)
        last = sequence.num_tokens - 1
        return min(found, last - last % self.page_size)

    def room(self, background: bool) -> int:
        """Pages that a reservation may count on: background work evicts nothing."""
        usage = self._cache.usage
        return usage.free if background else usage.free + usage.evictable

    def least(self, sequence: Sequence, cached: int) -> int:
        """Pages that admission takes beyond the `cached` tokens that it finds; more, where nobody holds those."""
        return -(-_wanted(sequence) // self.page_size) - cached // self.page_size

    def acquire(self, sequence: Sequence) -> Lease:
        """Locks the longest cached prefix; counts as a look-up once for each sequence."""
        return self._cache.acquire(
            sequence.tokens[: sequence.num_tokens],
            namespace=sequence.cache_namespace,
            limit=sequence.num_tokens - 1 if self.shares(sequence) else 0,
            priority=sequence.request.priority,
            owner=sequence.request.owner,
            record=sequence.admitted is None,
        )

    def enter(self, lease: Lease, sequence: Sequence) -> OutOfPages | None:
        """Room for what it has and one token more, or a newcomer would be the first to be preempted."""
        return self.reserve(lease, sequence, _wanted(sequence))

    def reserve(self, lease: Lease, sequence: Sequence, tokens: int) -> OutOfPages | None:
        try:
            lease.reserve(tokens, may_evict=not sequence.background)
        except OutOfPages as error:
            return error
        return None

    def ahead(self, lease: Lease, tokens: int, at_most: int, spared: int) -> int:
        """For how many tokens behind the first `tokens` there are pages, if all free ones but `spared` are taken."""
        free = max(0, self._cache.usage.free - spared)
        return max(0, min(at_most, (len(lease.pages) + free) * self.page_size - tokens))

    def fork(self, lease: Lease) -> Lease | None:
        """Another lease on what is committed; None where there is no page for the unfilled one."""
        try:
            return lease.fork()
        except OutOfPages:
            return None

    def unpin(self) -> bool:
        """Ends all pins; False where there are none."""
        pins = self._cache.pins
        for pin in pins:
            self._cache.unpin(pin.owner)
        return bool(pins)


def _wanted(sequence: Sequence) -> int:
    return min(sequence.num_tokens + 1, sequence.capacity)
