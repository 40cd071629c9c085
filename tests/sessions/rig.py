"""All of sessions/ wired around a scripted engine, as one process would have it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sessions import LoggedEvent, MemoryBroker, Session, SessionService, Store, Turn, TurnService, TurnSettings
from tests.sessions.scripted_engine import ScriptedEngine

OWNER = "local"
QUICK = TurnSettings(save_interval=3600, stop_wait=5, first_retry=0, last_retry=0)


@dataclass
class Rig:
    """Everything of one process, wired; `open` another one for the next process."""

    url: str
    store: Store
    engine: ScriptedEngine
    broker: MemoryBroker
    turns: TurnService
    sessions: SessionService
    closed: bool = field(default=False)

    @classmethod
    async def open(
        cls, url: str, engine: ScriptedEngine | None = None, settings: TurnSettings = QUICK, **store: Any
    ) -> Rig:
        opened = await Store.open(url, **store)
        engine = engine or ScriptedEngine()
        broker = MemoryBroker()
        turns = TurnService(opened, engine, broker, settings=settings)
        return cls(url, opened, engine, broker, turns, SessionService(opened, turns, engine.info.adapters))

    async def session(self, **fields: Any) -> Session:
        return await self.sessions.create(OWNER, **fields)

    async def send(self, session: Session, content: str, **fields: Any) -> Turn:
        return await self.turns.start(OWNER, session.id, content=content, **fields)

    async def log(self, turn: Turn, after: int = 0) -> list[LoggedEvent]:
        """All events up to the terminal one."""
        return [event async for event in await self.turns.events(OWNER, turn.generation.id, after)]

    async def ask(self, session: Session, content: str, answer: str = "fine") -> Turn:
        """A whole turn: sent, answered, finished."""
        turn = await self.send(session, content)
        live = self.engine.latest
        live.admit()
        live.say(answer)
        live.finish()
        await self.log(turn)
        return turn

    async def heard(self, turn: Turn, text: str) -> None:
        """Waits until the log says this text."""
        so_far = ""
        async for event in await self.turns.events(OWNER, turn.generation.id):
            so_far += event.data.get("text", "")
            if so_far == text:
                return

    async def texts(self, session: Session) -> list[tuple[str, str, str]]:
        messages = await self.sessions.messages(OWNER, session.id)
        return [(message.role, message.content, message.status) for message in messages]

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            await self.turns.close(0)
            await self.store.close()
