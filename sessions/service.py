"""Sessions as their owners see them: made, listed, read, deleted. Somebody else's session does not exist."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from engine.api import SamplingParams
from engine.errors import RequestError
from sessions.broker import SessionEvent
from sessions.content import check_text
from sessions.context import POLICIES
from sessions.cursor import decode_cursor
from sessions.errors import InvalidInput
from sessions.params import check_params, resolve_adapter, resolve_params
from sessions.records import Message, Page, Session
from sessions.session_queries import (
    add_session,
    message_path,
    message_tree,
    remove_session,
    session_page,
    session_row,
)
from sessions.store import Store
from sessions.turns import TurnService

PAGE_LIMIT = 100


class SessionService:
    """Every method may raise StorageBusy; those that take a session id raise NotFound.

    adapters: the names that sessions may ask for, known before the engine is there. check: raises the engine's
    RequestError for parameters that it would refuse; nothing while there is no engine yet.
    """

    def __init__(
        self,
        store: Store,
        turns: TurnService,
        adapters: Collection[str] = (),
        check: Callable[[SamplingParams], None] = lambda params: None,
    ) -> None:
        self._store = store
        self._turns = turns
        self._adapters = adapters
        self._check = check

    async def create(
        self,
        owner: str,
        *,
        title: str | None = None,
        system_prompt: str | None = None,
        params: Mapping[str, Any] | None = None,
        context_policy: str = "window",
    ) -> Session:
        """system_prompt: None is the template's own default, "" is none. Raises InvalidInput."""
        if context_policy not in POLICIES:
            raise InvalidInput("context_policy", f"must be one of {', '.join(sorted(POLICIES))}")
        checked = check_params(params)
        sampling = resolve_params(SamplingParams(), checked)
        try:
            await asyncio.to_thread(self._check, sampling)
        except RequestError as error:
            raise InvalidInput("params", str(error)) from None
        resolve_adapter(self._adapters, checked)
        now = self._store.now()
        session = Session(
            id=self._store.ids.session(),
            owner=owner,
            title=None if title is None else check_text("title", title),
            system_prompt=None if system_prompt is None else check_text("system_prompt", system_prompt),
            params=checked,
            context_policy=context_policy,
            active_leaf=None,
            created_at=now,
            updated_at=now,
        )
        async with self._store.write() as db:
            await add_session(db, session)
        return session

    async def list(self, owner: str, *, limit: int = 50, after: str | None = None) -> Page[Session]:
        """The last updated first; new sessions never shift the pages after `after`. Raises InvalidInput, BadCursor."""
        if not 1 <= limit <= PAGE_LIMIT:
            raise InvalidInput("limit", f"must be between 1 and {PAGE_LIMIT}")
        cursor = None if after is None else decode_cursor(after)
        async with self._store.read() as db:
            return await session_page(db, owner, limit, cursor)

    async def get(self, owner: str, session_id: str) -> Session:
        async with self._store.read() as db:
            return (await session_row(db, owner, session_id)).record()

    async def messages(self, owner: str, session_id: str, *, tree: bool = False) -> Sequence[Message]:
        """The active path from its root to its leaf, or the whole tree, parents before children."""
        async with self._store.read() as db:
            row = await session_row(db, owner, session_id)
            if tree:
                return await message_tree(db, session_id)
            return [stored.message for stored in await message_path(db, session_id, row.active_leaf)]

    async def delete(self, owner: str, session_id: str) -> None:
        """Stops the session's turn, deletes everything, and tells subscribers; goes on when the caller goes away."""
        await asyncio.shield(asyncio.create_task(self._delete(owner, session_id)))

    async def _delete(self, owner: str, session_id: str) -> None:
        await self.get(owner, session_id)
        await self._turns.stop_session(session_id)
        async with self._store.write() as db:
            await remove_session(db, owner, session_id)
        await self._turns.forget_session(session_id)
        await self._turns.broker.publish(SessionEvent("session.deleted", session_id, None, {}))
