"""Conversations: message tree, transcripts as token ids, turns, context fitting, event logs."""

from sessions.broker import Broker, LoggedEvent, LogSnapshot, SessionEvent, Subscription
from sessions.errors import (
    BadCursor,
    ContextOverflow,
    IdempotencyConflict,
    InvalidInput,
    LogGone,
    NotFound,
    SessionBusy,
    SessionsError,
    StorageBusy,
    StorageInUse,
    StorageUnusable,
    SubscriberLagged,
)
from sessions.memory_broker import MemoryBroker
from sessions.planner import LOCAL_OWNER
from sessions.records import ContextCut, Generation, Message, Page, Session, Turn
from sessions.service import SessionService
from sessions.store import Store
from sessions.turns import TurnService, TurnSettings
from sessions.wire import generation_json, message_json, session_json, timings_json, turn_json, usage_json

__all__ = [
    "LOCAL_OWNER",
    "BadCursor",
    "Broker",
    "ContextCut",
    "ContextOverflow",
    "Generation",
    "IdempotencyConflict",
    "InvalidInput",
    "LogGone",
    "LogSnapshot",
    "LoggedEvent",
    "MemoryBroker",
    "Message",
    "NotFound",
    "Page",
    "Session",
    "SessionBusy",
    "SessionEvent",
    "SessionService",
    "SessionsError",
    "StorageBusy",
    "StorageInUse",
    "StorageUnusable",
    "Store",
    "SubscriberLagged",
    "Subscription",
    "Turn",
    "TurnService",
    "TurnSettings",
    "generation_json",
    "message_json",
    "session_json",
    "timings_json",
    "turn_json",
    "usage_json",
]
