"""A process that is killed in mid-turn: python -m tests.sessions.crash_child DATABASE_URL"""

from __future__ import annotations

import asyncio
import sys

from tests.sessions.letters_codec import token
from tests.sessions.rig import Rig


async def main(url: str) -> None:
    rig = await Rig.open(url)
    session = await rig.session()
    await rig.ask(session, "first", "whole")
    turn = await rig.send(session, "second")
    live = rig.engine.latest
    live.admit()
    live.say("saved ")
    live.say_ids([token(0xC3)])
    await rig.heard(turn, "saved ")
    await rig.turns.save_now()
    live.say("x")
    print(session.id, turn.generation.id, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
