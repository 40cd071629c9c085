"""Figures about the cache, as copies that any thread may keep."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Pages by state; they always sum to the pool.

    private: held by a lease, not in the tree. locked: in the tree and held. evictable: in the tree, held by nobody.
    """

    free: int
    evictable: int
    locked: int
    private: int

    @property
    def total(self) -> int:
        return self.free + self.evictable + self.locked + self.private


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the start; they only grow, and readers derive rates from two readings.

    A lookup is one admitted request: query_tokens were asked for, hit_tokens of them found. Pages: inserted into the
    tree, evicted for want of room, duplicates freed because another lease had stored the same tokens first, cleared by
    reset or close; inserted - evicted - cleared are resident. evicted_idle_ms sums, over the evicted pages, the
    milliseconds since their last use.
    """

    lookups: int
    query_tokens: int
    hit_tokens: int
    inserted_pages: int
    evicted_pages: int
    duplicate_pages: int
    cleared_pages: int
    evicted_idle_ms: int

    @property
    def hit_rate(self) -> float | None:
        """The share of looked-up tokens that was found; None while nothing was looked up."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else None

    @property
    def resident_pages(self) -> int:
        return self.inserted_pages - self.evicted_pages - self.cleared_pages


@dataclass(slots=True)
class Counters:
    """The growing side of CacheStats."""

    lookups: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    inserted_pages: int = 0
    evicted_pages: int = 0
    duplicate_pages: int = 0
    cleared_pages: int = 0
    evicted_idle_ms: int = 0

    def read(self) -> CacheStats:
        return CacheStats(
            self.lookups,
            self.query_tokens,
            self.hit_tokens,
            self.inserted_pages,
            self.evicted_pages,
            self.duplicate_pages,
            self.cleared_pages,
            self.evicted_idle_ms,
        )
