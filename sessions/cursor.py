"""Page cursors: the sort key of the last row seen, so that new rows never shift a page."""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sessions.errors import BadCursor

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_ID = re.compile("ses_[0-9A-Z]{26}")


@dataclass(frozen=True, slots=True)
class Cursor:
    updated_at: datetime
    id: str

    def encode(self) -> str:
        key = json.dumps([(self.updated_at - _EPOCH) // _MICROSECOND, self.id], separators=(",", ":"))
        return base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")


def decode_cursor(text: str) -> Cursor:
    """Raises BadCursor for anything that `Cursor.encode` did not make."""
    try:
        padded = text.encode("ascii") + b"=" * (-len(text) % 4)
        microseconds, id = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        cursor = Cursor(_EPOCH + microseconds * _MICROSECOND, id)
        ours = isinstance(microseconds, int) and isinstance(id, str) and _ID.fullmatch(id) and cursor.encode() == text
    except (ValueError, TypeError, OverflowError, binascii.Error, RecursionError):
        raise BadCursor from None
    if not ours:
        raise BadCursor
    return cursor
