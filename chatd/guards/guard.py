"""The outermost ASGI layer: request ids, security headers, Host and Origin, media type and size of bodies.

request ── id ── Host: 421 ── Origin on writes and sockets: 403 ── JSON only: 415 ── 1 MiB: 413 ── app
"""

from __future__ import annotations

import json
import re
import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chatd.errors import Problem
from chatd.guards.addresses import HostList, OriginList

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DROPPED_BODIES = 16
_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_CSP = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _CSP.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Guard:
    """body_limit in bytes."""

    def __init__(self, app: ASGIApp, hosts: HostList, origins: OriginList, body_limit: int) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = origins
        self._body_limit = body_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        request_id = asked if _REQUEST_ID.fullmatch(asked) else f"req_{secrets.token_hex(8)}"
        scope.setdefault("state", {})["request_id"] = request_id
        problem = self._refusal(scope, headers)
        if scope["type"] == "websocket":
            if problem is None:
                await self._app(scope, receive, send)
            else:
                await _deny_socket(problem, scope["path"], request_id, send)
            return
        added = [*_HEADERS, (b"x-request-id", request_id.encode())]
        if not scope["path"].startswith("/assets/"):
            added.append((b"cache-control", b"no-store"))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(pair for pair in added if pair[0] not in present)]
            await send(message)

        if problem is None and scope["method"] not in _READS:
            body = await _whole_body(receive, self._body_limit)
            if body is None:
                return
            problem = self._body_refusal(body, headers)
            receive = _replayed(body, receive)
        if problem is None:
            await self._app(scope, receive, send_with_headers)
        else:
            await _respond(problem, scope["path"], request_id, send_with_headers)

    def _refusal(self, scope: Scope, headers: Headers) -> Problem | None:
        host = headers.get("host", "")
        if not self._hosts.valid(host):
            return Problem(400, "bad_request", "the Host header is missing or not valid")
        if not self._hosts.trusts(host):
            return Problem(421, "host_not_allowed", "this host name is not allowed; see the setting allowed_hosts")
        if scope["type"] == "http" and scope["method"] in _READS:
            return None
        origin = headers.get("origin")
        if origin is not None and not self._origins.trusts(origin, host):
            return Problem(
                403, "origin_not_allowed", "pages of this origin may not write; see the setting allowed_origins"
            )
        return None

    def _body_refusal(self, body: bytes, headers: Headers) -> Problem | None:
        if len(body) > self._body_limit:
            return Problem(413, "too_large", f"a body may have at most {self._body_limit} bytes")
        media_type = headers.get("content-type")
        if media_type is None and not body:
            return None
        essence = (media_type or "").split(";")[0].strip().lower()
        if essence != "application/json":
            return Problem(415, "unsupported_media_type", "send JSON, with Content-Type: application/json")
        return None


async def _whole_body(receive: Receive, limit: int) -> bytes | None:
    """The body, or a little more than the limit of it; None when the client went away.

    What is beyond the limit is read and dropped, up to a point: a client that still writes sees no answer.
    """
    chunks: list[bytes] = []
    size, more = 0, True
    while more and size <= _DROPPED_BODIES * limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk = message.get("body", b"")
        if size <= limit:
            chunks.append(chunk)
        size += len(chunk)
        more = message.get("more_body", False)
    return b"".join(chunks)


def _replayed(body: bytes, receive: Receive) -> Receive:
    waiting = [body]

    async def replay() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replay


async def _respond(problem: Problem, path: str, request_id: str, send: Send) -> None:
    headers, body = _rendered(problem, path, request_id)
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _deny_socket(problem: Problem, path: str, request_id: str, send: Send) -> None:
    headers, body = _rendered(problem, path, request_id)
    headers += [*_HEADERS, (b"x-request-id", request_id.encode())]
    await send({"type": "websocket.http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body, "more_body": False})


def _rendered(problem: Problem, path: str, request_id: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
    openai = path.startswith("/v1/")
    content = problem.openai_json() if openai else problem.problem_json(request_id)
    body = json.dumps(content).encode()
    media_type = b"application/json" if openai else b"application/problem+json"
    headers = [(b"content-type", media_type), (b"content-length", str(len(body)).encode())]
    if problem.status == 413:
        headers.append((b"connection", b"close"))
    return headers, body
