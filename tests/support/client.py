"""A small client of a running server: REST, server-sent events and the WebSocket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
from websockets.sync.client import connect
from websockets.typing import Subprotocol

Json = dict[str, Any]
TERMINAL = ("generation.done", "generation.failed")


@dataclass
class Heard:
    """A reply as the events told it: the text put together, and every seq in order."""

    text: str = ""
    seqs: list[tuple[int, int]] = field(default_factory=list)
    started: Json = field(default_factory=dict)
    end: Json = field(default_factory=dict)

    def take(self, kind: str, seq_from: int, seq: int, data: Json) -> None:
        self.seqs.append((seq_from, seq))
        if kind == "generation.started":
            self.started = data
        elif kind == "generation.delta":
            assert data["offset"] == len(self.text)
            self.text += data["text"]
        elif kind in TERMINAL:
            self.end = data

    @property
    def last_seq(self) -> int:
        return self.seqs[-1][1] if self.seqs else 0

    def assert_contiguous(self) -> None:
        expected = 1
        for seq_from, seq in self.seqs:
            assert seq_from == expected
            expected = seq + 1


class RestClient:
    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self._http.request(method, path, **options)

    def get(self, path: str) -> Any:
        response = self._http.get(path).raise_for_status()
        return response.json()

    def create_session(self, **fields: Any) -> str:
        response = self._http.post("/api/v1/sessions", json=fields).raise_for_status()
        return str(response.json()["id"])

    def send(self, session: str, content: str, **fields: Any) -> Json:
        response = self._http.post(f"/api/v1/sessions/{session}/messages", json={"content": content, **fields})
        turn: Json = response.raise_for_status().json()
        return turn

    def messages(self, session: str) -> list[Json]:
        return list(self.get(f"/api/v1/sessions/{session}/messages")["data"])

    def events(self, generation: str, after: int = 0) -> Iterator[tuple[str, int, Json]]:
        """(type, seq, data) of a generation's log, from `after` to its terminal event."""
        path = f"/api/v1/generations/{generation}/events"
        with self._http.stream("GET", path, params={"after": after}) as response:
            response.raise_for_status()
            kind, seq = "", 0
            for line in response.iter_lines():
                name, _, value = line.partition(": ")
                if name == "event":
                    kind = value
                elif name == "id":
                    seq = int(value)
                elif name == "data":
                    yield kind, seq, json.loads(value)

    def say(self, session: str, content: str, **fields: Any) -> Heard:
        """One turn to its end."""
        heard = Heard()
        for kind, seq, data in self.events(self.send(session, content, **fields)["generation"]["id"]):
            heard.take(kind, seq, seq, data)
        assert heard.end
        return heard


class Socket:
    """The WebSocket, frame by frame."""

    def __init__(self, url: str, resume: list[Json] | None = None) -> None:
        address = url.replace("http", "ws") + "/api/v1/ws"
        self._open = ExitStack()
        self._connection = self._open.enter_context(connect(address, subprotocols=[Subprotocol("chat.v1")]))
        self.send({"type": "hello", "data": {"resume": resume or []}})
        self.until("welcome")

    def send(self, frame: Json) -> None:
        self._connection.send(json.dumps(frame))

    def receive(self) -> Json:
        frame: Json = json.loads(self._connection.recv(timeout=60))
        return frame

    def until(self, *kinds: str) -> Json:
        while True:
            frame = self.receive()
            if frame["type"] in kinds:
                return frame

    def follow(self, heard: Heard, *, deltas: int | None = None) -> None:
        """Takes in a generation's frames, up to its end or to so many deltas."""
        while not heard.end and deltas != 0:
            frame = self.receive()
            if "seq" in frame and frame["type"].startswith("generation."):
                heard.take(frame["type"], frame.get("seq_from", frame["seq"]), frame["seq"], frame["data"])
                if deltas is not None and frame["type"] == "generation.delta":
                    deltas -= 1

    def close(self) -> None:
        self._open.close()
