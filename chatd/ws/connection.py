"""One WebSocket connection, from accept to close.

reader ── frame ── handler ──┐
followers ── events ─────────┼── outbox (bounded) ── sender ── socket
watcher ── heartbeat ────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from chatd.errors import Problem, problem_of
from chatd.owner import OWNER
from chatd.ws.follower import CLOSE_BROKEN, CLOSE_STALLED, Follower
from chatd.ws.frames import (
    ClientFrame,
    GenerationCancel,
    Hello,
    MessageCreate,
    Ping,
    Subscribe,
    UnparseableFrame,
    Unsubscribe,
    frame_id,
    frame_text,
    parse_frame,
    parse_json,
)
from chatd.ws.rate import TokenBucket
from chatd.ws.timing import MAX_FRAME_BYTES, SocketTiming
from sessions import SessionService, TurnService, generation_json, turn_json

logger = logging.getLogger(__name__)

SUBPROTOCOL = "chat.v1"
CLOSE_BAD_JSON = 4400
CLOSE_RESTART = 1012
_JOBS = 16
_PONG = '{"type":"pong"}'

_RATE_LIMITED = Problem(429, "rate_limited", "too many frames", retry_after=1)
_HELLO_FIRST = Problem(422, "hello_first", "the first frame, and only the first, is hello")


class Connection:
    """Made for an unaccepted socket; `run` ends when the socket has."""

    def __init__(
        self, socket: WebSocket, connection_id: str, turns: TurnService, sessions: SessionService, timing: SocketTiming
    ) -> None:
        self._socket = socket
        self._id = connection_id
        self._turns = turns
        self._timing = timing
        self._outbox: asyncio.Queue[str] = asyncio.Queue(timing.outbox_frames)
        self._bucket = TokenBucket(timing.frames_per_s, timing.burst)
        self._follower = Follower(turns, sessions, self._send, snapshot_above=timing.snapshot_above, close=self.close)
        self._greeted = False
        self._jobs: set[asyncio.Task[None]] = set()
        self._clock = asyncio.get_running_loop().time
        self._last_sent = self._clock()
        self._sending_since: float | None = None
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()

    def close(self, code: int) -> None:
        """Asks for the end of the connection; the first code wins."""
        if not self._code.done():
            self._code.set_result(code)

    def announce(self, frame: dict[str, Any]) -> None:
        """Sends a frame unless the outbox is full."""
        with contextlib.suppress(asyncio.QueueFull):
            self._outbox.put_nowait(frame_text(frame))

    async def ended(self) -> None:
        await self._ended.wait()

    async def run(self) -> None:
        offered = SUBPROTOCOL in self._socket.scope.get("subprotocols", [])
        await self._socket.accept(subprotocol=SUBPROTOCOL if offered else None)
        work = [asyncio.create_task(part()) for part in (self._read, self._write, self._watch)]
        try:
            watched: list[asyncio.Future[Any]] = [*work, self._code]
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if self._code.done() and self._code.result() == CLOSE_RESTART:
                await self._flush()
        finally:
            for task in [*work, *self._jobs]:
                task.cancel()
            await self._follower.close()
            results = await asyncio.gather(*work, *self._jobs, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception) and not isinstance(result, WebSocketDisconnect):
                    logger.error("connection %s broke", self._id, exc_info=result)
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):
                await self._socket.close(self._code.result() if self._code.done() else CLOSE_BROKEN)
            self._ended.set()

    async def _flush(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timing.flush_s):
                await self._follower.settle()
                await self._outbox.join()

    async def _send(self, frame: dict[str, Any]) -> None:
        await self._outbox.put(frame_text(frame))

    async def _write(self) -> None:
        while True:
            text = await self._outbox.get()
            self._sending_since = self._clock()
            await self._socket.send_text(text)
            self._last_sent, self._sending_since = self._clock(), None
            self._outbox.task_done()

    async def _watch(self) -> None:
        timing = self._timing
        period = min(timing.heartbeat_s, timing.stall_s) / 4
        while True:
            await asyncio.sleep(period)
            now = self._clock()
            if self._sending_since is not None:
                if now - self._sending_since >= timing.stall_s:
                    self.close(CLOSE_STALLED)
            elif self._outbox.empty() and now - self._last_sent >= timing.heartbeat_s - period:
                self._outbox.put_nowait(_PONG)

    async def _read(self) -> None:
        try:
            while True:
                message = await self._socket.receive()
                if message["type"] != "websocket.receive":
                    return
                text = message.get("text")
                if text is None:
                    raise UnparseableFrame
                await self._take(parse_json(text))
        except UnparseableFrame:
            self.close(CLOSE_BAD_JSON)

    async def _take(self, value: Any) -> None:
        """Handles one frame; whatever is wrong with it becomes an error frame."""
        re = frame_id(value)
        if not self._bucket.take():
            await self._refuse(re, _RATE_LIMITED)
            return
        try:
            frame = parse_frame(value)
            if isinstance(frame, Hello) == self._greeted:
                await self._refuse(re, _HELLO_FIRST)
            elif isinstance(frame, MessageCreate | GenerationCancel):
                while len(self._jobs) >= _JOBS:
                    await asyncio.wait(self._jobs, return_when=asyncio.FIRST_COMPLETED)
                job = asyncio.create_task(self._job(frame))
                self._jobs.add(job)
                job.add_done_callback(self._jobs.discard)
            else:
                await self._answer(frame)
        except Exception as error:
            await self._refuse(re, _problem(error))

    async def _job(self, frame: MessageCreate | GenerationCancel) -> None:
        try:
            if isinstance(frame, MessageCreate):
                await self._create(frame)
            else:
                await self._cancel(frame)
        except Exception as error:
            await self._refuse(frame.id, _problem(error))

    async def _answer(self, frame: ClientFrame) -> None:
        match frame:
            case Hello():
                self._greeted = True
                await self._send(self._welcome())
                for point in frame.points:
                    await self._follower.resume(point.generation, point.last_seq)
            case Subscribe():
                ack = {"type": "ack", "re": frame.id, "session": frame.session}
                await self._follower.subscribe(frame.session, lambda: self._send(ack))
            case Unsubscribe():
                self._follower.unsubscribe(frame.session)
                await self._send({"type": "ack", "re": frame.id, "session": frame.session})
            case Ping():
                await self._send({"type": "pong"} | ({} if frame.id is None else {"re": frame.id}))

    def _welcome(self) -> dict[str, Any]:
        limits = {"max_message_bytes": MAX_FRAME_BYTES, "frames_per_s": self._timing.frames_per_s}
        heartbeat_ms = round(self._timing.heartbeat_s * 1000)
        data = {"connection_id": self._id, "heartbeat_ms": heartbeat_ms, "limits": limits}
        return {"type": "welcome", "data": data}

    async def _create(self, frame: MessageCreate) -> None:
        asked = frame.data
        turn = await self._turns.start(
            OWNER,
            frame.session,
            content=asked.content,
            parent_id=asked.parent_id,
            client_msg_id=asked.client_msg_id,
            params=None if asked.params is None else asked.params.given(),
        )
        await self._send({"type": "ack", "re": frame.id, "session": frame.session, "data": turn_json(turn)})
        self._follower.follow(frame.session, turn.generation.id)

    async def _cancel(self, frame: GenerationCancel) -> None:
        generation = await self._turns.cancel(OWNER, frame.generation)
        if frame.id is not None:
            data = {"generation": generation_json(generation)}
            await self._send({"type": "ack", "re": frame.id, "session": generation.session_id, "data": data})

    async def _refuse(self, re: str | None, problem: Problem) -> None:
        frame: dict[str, Any] = {"type": "error", "data": problem.frame_data()}
        await self._send(frame if re is None else {**frame, "re": re})


def _problem(error: Exception) -> Problem:
    problem = problem_of(error)
    if problem.status == 500:
        logger.error("a frame could not be handled", exc_info=error)
    return problem
