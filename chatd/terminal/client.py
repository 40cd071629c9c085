"""A session over the WebSocket, one answer at a time, without an event loop."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any, TextIO

from websockets.exceptions import InvalidHandshake, InvalidURI, WebSocketException
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from chatd.terminal.interrupts import Interrupts
from chatd.terminal.stats import stats_line
from chatd.ws.connection import SUBPROTOCOL

_POLL_S = 0.1
_OPEN_S = 10.0


class ConnectionLost(Exception):
    """There is no server, or no longer one."""


class Refused(Exception):
    """The server said no; the connection goes on."""


class ChatClient:
    """Made by `connect`, a context manager that closes the connection at its end."""

    def __init__(self, socket: ClientConnection, session_id: str) -> None:
        self._socket = socket
        self.session_id = session_id

    @classmethod
    @contextlib.contextmanager
    def connect(cls, url: str, session_id: str | None) -> Iterator[ChatClient]:
        """Opens a session, a new one unless named. Raises ConnectionLost, Refused."""
        url = url.rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise ConnectionLost("the address of the server must start with http:// or https://")
        if session_id is None:
            session_id = str(_call(f"{url}/api/v1/sessions", {})["id"])
        with contextlib.ExitStack() as stack:
            client = cls(stack.enter_context(_connected(url)), session_id)
            client._send({"type": "hello"})
            client._send({"type": "subscribe", "id": "subscribe", "session": session_id})
            client._acknowledged("subscribe")
            yield client

    def ask(self, content: str, interrupts: Interrupts, out: TextIO) -> None:
        """Sends a message and writes its answer as it comes, then the numbers. Raises ConnectionLost, Refused."""
        interrupts.answer_begins()
        try:
            name = str(uuid.uuid4())
            data = {"content": content, "client_msg_id": name}
            self._send({"type": "message.create", "id": name, "session": self.session_id, "data": data})
            generation, early = self._generation_of(name)
            self._show(generation, early, interrupts, out)
        finally:
            interrupts.answer_ends()

    def _generation_of(self, name: str) -> tuple[str, list[dict[str, Any]]]:
        """The generation that answers the message `name`, and the frames that came before its acknowledgement."""
        early = []
        while True:
            frame = self._next()
            if frame.get("re") != name:
                early.append(frame)
            elif frame["type"] == "error":
                raise Refused(frame["data"]["message"])
            else:
                return frame["data"]["generation"]["id"], early

    def _show(self, generation: str, early: list[dict[str, Any]], interrupts: Interrupts, out: TextIO) -> None:
        cancelled = False
        early.reverse()
        shown = 0
        while True:
            if interrupts.leaving:
                return
            if interrupts.cancelling and not cancelled:
                cancelled = True
                self._send({"type": "generation.cancel", "generation": generation})
            frame = early.pop() if early else self._poll()
            if frame is None or frame.get("generation") != generation:
                continue
            data = frame.get("data", {})
            match frame["type"]:
                case "generation.delta":
                    new = data["text"][max(shown - data["offset"], 0) :]
                    shown += len(new)
                    out.write(new)
                    out.flush()
                case "snapshot":
                    new = data["message"]["content"][shown:]
                    shown += len(new)
                    out.write(new)
                    out.flush()
                case "generation.done":
                    ended = "" if data["finish_reason"] == "stop" else f" · {data['finish_reason'] or data['status']}"
                    out.write(f"\n{stats_line(data['usage'], data['timings'])}{ended}\n")
                    out.flush()
                    return
                case "generation.failed":
                    out.write("\n" if shown else "")
                    raise Refused(f"the answer failed: {data['message']}")

    def _acknowledged(self, re: str) -> None:
        while True:
            frame = self._next()
            if frame.get("re") == re:
                if frame["type"] == "error":
                    raise Refused(frame["data"]["message"])
                return

    def _send(self, frame: dict[str, Any]) -> None:
        try:
            self._socket.send(json.dumps(frame))
        except WebSocketException as error:
            raise ConnectionLost("the connection to the server was lost") from error

    def _next(self) -> dict[str, Any]:
        while True:
            if (frame := self._poll()) is not None:
                return frame

    def _poll(self) -> dict[str, Any] | None:
        """The next frame, or None after a short while, so that an interrupt is seen."""
        try:
            frame: dict[str, Any] = json.loads(self._socket.recv(timeout=_POLL_S))
        except TimeoutError:
            return None
        except WebSocketException as error:
            raise ConnectionLost("the connection to the server was lost") from error
        return frame


@contextlib.contextmanager
def _connected(url: str) -> Iterator[ClientConnection]:
    with contextlib.ExitStack() as stack:
        try:
            socket = stack.enter_context(
                connect(
                    f"ws{url.removeprefix('http')}/api/v1/ws",
                    subprotocols=[Subprotocol(SUBPROTOCOL)],
                    open_timeout=_OPEN_S,
                    max_size=None,
                    compression=None,
                )
            )
        except (OSError, InvalidHandshake, InvalidURI, TimeoutError) as error:
            raise ConnectionLost(f"no chatd server answers at {url}") from error
        yield socket


def _call(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=_OPEN_S) as response:
            answer: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            raise Refused(f"the server refuses: {_detail(error)}") from error
    except (OSError, ValueError) as error:
        raise ConnectionLost(f"no chatd server answers at {url.removesuffix('/api/v1/sessions')}") from error
    return answer


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["detail"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"
