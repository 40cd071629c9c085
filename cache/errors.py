"""What can go wrong in the cache, as types."""

from __future__ import annotations


class CacheError(Exception):
    """The base of everything that cache/ raises on purpose, ValueError for bad arguments aside."""


class OutOfPages(CacheError):
    """The pool cannot give `needed` pages: `free` are free and `evictable` could be freed. Nothing was changed."""

    def __init__(self, needed: int, free: int, evictable: int) -> None:
        self.needed, self.free, self.evictable = needed, free, evictable
        super().__init__(f"{needed} pages are needed, {free} are free and {evictable} evictable")


class PinLimit(CacheError):
    """All pins together would hold `wanted` pages, more than the `limit`. Nothing was changed."""

    def __init__(self, wanted: int, limit: int) -> None:
        self.wanted, self.limit = wanted, limit
        super().__init__(f"{wanted} pages would be pinned, more than the limit of {limit}")


class LeaseClosed(CacheError):
    """The lease was released: it names no pages any more."""


class CacheCorruption(CacheError):
    """The books do not agree with each other: a defect, never the caller's data."""
