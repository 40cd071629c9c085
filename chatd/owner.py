"""Whose sessions this server keeps: there are no accounts, so everything belongs to one owner."""

from __future__ import annotations

from sessions import LOCAL_OWNER

OWNER = LOCAL_OWNER
