"""Pages and prefixes of the KV pool: who may use which page, and which tokens it holds."""

from cache.errors import CacheCorruption, CacheError, LeaseClosed, OutOfPages, PinLimit
from cache.events import Cleared, Event, Removed, Resync, Stored
from cache.lease import Lease, TailCopy
from cache.miss import Miss, MissKind
from cache.pins import Pin
from cache.policies import PolicyName
from cache.pool import PagePool
from cache.prefix_cache import PrefixCache
from cache.stats import CacheStats, Usage
from cache.tokens import PageIds, TokenIds, Tokens, as_tokens
from cache.view import TreeNode

__all__ = [
    "CacheCorruption",
    "CacheError",
    "CacheStats",
    "Cleared",
    "Event",
    "Lease",
    "LeaseClosed",
    "Miss",
    "MissKind",
    "OutOfPages",
    "PageIds",
    "PagePool",
    "Pin",
    "PinLimit",
    "PolicyName",
    "PrefixCache",
    "Removed",
    "Resync",
    "Stored",
    "TailCopy",
    "TokenIds",
    "Tokens",
    "TreeNode",
    "Usage",
    "as_tokens",
]
