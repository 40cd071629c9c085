"""Plans a turn: loads the path, encodes it, makes it fit. Reads only, so that a refusal leaves no trace."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from engine.api import Engine, GenerateRequest
from engine.text.api import ChatMessage
from sessions.context import Budget, fit
from sessions.errors import InvalidInput
from sessions.params import resolve_adapter, resolve_params
from sessions.records import Generation, Message, Turn
from sessions.session_queries import message_path, session_row
from sessions.store import Store
from sessions.transcript import Conversation, StoredMessage
from sessions.turn_plan import TurnPlan, TurnRequest

LOCAL_OWNER = "local"
"""The owner of a server without accounts; its cached pages are in the default namespace."""


class Planner:
    """Encoding runs in a worker thread, so that a long text does not hold up the running turns."""

    def __init__(self, store: Store, engine: Engine) -> None:
        self._store = store
        self._engine = engine

    async def plan(self, owner: str, session_id: str, asked: TurnRequest) -> TurnPlan:
        """Raises NotFound, InvalidInput, ContextOverflow, StorageBusy, and what the codec raises."""
        async with self._store.read() as db:
            row = await session_row(db, owner, session_id)
            parent_id = asked.parent_id if asked.parent_id is not None else row.active_leaf
            path = await message_path(db, session_id, parent_id)
        if asked.parent_id is not None and not path:
            raise InvalidInput("parent_id", "is no message of this session")
        params = resolve_params(self._engine.info.default_params, row.params, asked.params)
        adapter = resolve_adapter(self._engine.info.adapters, row.params, asked.params)
        turn = self._new_turn(session_id, parent_id, asked.content)
        prompt = row.system_prompt
        conversation = Conversation(
            system=None if prompt is None else ChatMessage("system", prompt, row.system_encoded),
            path=[*path, StoredMessage(turn.message, None)],
            now=row.created_at,
        )
        budget = Budget.of(self._engine.info, params)
        fitted = await asyncio.to_thread(fit, row.context_policy, self._engine.codec, conversation, budget)
        turn = replace(turn, message=replace(turn.message, cut=fitted.cut))
        request = GenerateRequest(
            id=turn.generation.id,
            tokens=fitted.transcript.prompt.tokens,
            params=params,
            namespace="" if owner == LOCAL_OWNER else owner,
            owner=session_id,
            adapter=adapter,
        )
        if params.grammar is not None:  # compiling it may take a moment; `check` and `submit` then find it
            await asyncio.to_thread(self._engine.check, len(request.tokens), params)
        return TurnPlan(
            asked=asked,
            owner=owner,
            turn=turn,
            leaf=row.active_leaf,
            request=request,
            encoded=fitted.transcript.fresh_ids(),
            system_encoded=fitted.transcript.fresh_system_ids(),
            cut=fitted.cut,
        )

    def _new_turn(self, session_id: str, parent_id: str | None, content: str) -> Turn:
        ids, now = self._store.ids, self._store.now()
        message = Message(
            id=ids.message(),
            session_id=session_id,
            parent_id=parent_id,
            role="user",
            content=content,
            status="complete",
            finish_reason=None,
            usage=None,
            timings=None,
            created_at=now,
        )
        reply = replace(
            message, id=ids.message(), parent_id=message.id, role="assistant", content="", status="streaming"
        )
        generation = Generation(
            id=ids.generation(),
            session_id=session_id,
            message_id=reply.id,
            status="queued",
            finish_reason=None,
            usage=None,
            timings=None,
        )
        return Turn(message, reply, generation)
