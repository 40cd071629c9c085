"""What can go wrong with conversations, as types. chatd/errors.py translates them once."""

from __future__ import annotations


class SessionsError(Exception):
    """The base of everything that sessions/ raises on purpose."""


class NotFound(SessionsError):
    """There is no such thing, or it belongs to somebody else."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"no such {what}")


class SessionBusy(SessionsError):
    """A turn runs in this session already."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        super().__init__("a turn is running in this session")


class InvalidInput(SessionsError):
    """`field` (dotted, as the caller wrote it) cannot be used, and why. The message never repeats the value."""

    def __init__(self, field: str, reason: str) -> None:
        self.field, self.reason = field, reason
        super().__init__(f"{field}: {reason}")


class ContextOverflow(SessionsError):
    """Even after trimming, the prompt and the reserve for the answer exceed the limit; all in tokens."""

    def __init__(self, prompt_tokens: int, reserve: int, limit: int) -> None:
        self.prompt_tokens, self.reserve, self.limit = prompt_tokens, reserve, limit
        super().__init__(
            f"{prompt_tokens} prompt tokens and {reserve} reserved for the answer do not fit into {limit} tokens"
        )


class IdempotencyConflict(SessionsError):
    """This client_msg_id was used before, with another body."""

    def __init__(self, client_msg_id: str) -> None:
        self.client_msg_id = client_msg_id
        super().__init__("client_msg_id was used before with another body")


class LogGone(SessionsError):
    """The event log of this generation is no longer kept; the stored message is."""

    def __init__(self, generation_id: str) -> None:
        self.generation_id = generation_id
        super().__init__("the event log of this generation is no longer kept")


class SubscriberLagged(SessionsError):
    """A subscriber let its queue run full; it has to read the session's state anew."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        super().__init__("the subscriber is too slow and has missed notices")


class BadCursor(SessionsError):
    """A page cursor that this server did not make."""

    def __init__(self) -> None:
        super().__init__("the cursor is not one of this server's")


class StorageBusy(SessionsError):
    """The database is locked or away; try again after `retry_after` seconds. Nothing was written."""

    def __init__(self, retry_after: int = 1) -> None:
        self.retry_after = retry_after
        super().__init__("the database is busy or cannot be reached")


class StorageInUse(SessionsError):
    """Another process works with this database already."""

    def __init__(self, where: str) -> None:
        self.where = where
        super().__init__(f"{where} is in use by another process; stop it, or choose another data folder or database")


class StorageUnusable(SessionsError):
    """The database cannot be used as it is: an unsupported URL, or a schema newer than this program."""
