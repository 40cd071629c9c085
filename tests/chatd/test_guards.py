"""What is refused before any route: hosts, origins, media types, sizes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from websockets.exceptions import InvalidStatus

from tests.chatd.harness import JSON, Server, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

SESSIONS = "/api/v1/sessions"


@pytest.mark.parametrize(
    ("headers", "content", "status", "code"),
    [
        ({"host": "evil.example"}, b"{}", 421, "host_not_allowed"),
        ({"host": "a b"}, b"{}", 400, "bad_request"),
        ({"origin": "https://evil.example"}, b"{}", 403, "origin_not_allowed"),
        ({"origin": "null"}, b"{}", 403, "origin_not_allowed"),
        ({"content-type": "text/plain"}, b"{}", 415, "unsupported_media_type"),
        ({"content-type": "application/x-www-form-urlencoded"}, b"", 415, "unsupported_media_type"),
        ({"content-type": ""}, b"{}", 415, "unsupported_media_type"),
        ({}, b'{"title": "' + b"x" * (1 << 20) + b'"}', 413, "too_large"),
    ],
)
@pytest.mark.parametrize("path", [SESSIONS, "/v1/chat/completions"])
async def test_writes_are_refused(
    live: Server, path: str, headers: dict[str, str], content: bytes, status: int, code: str
) -> None:
    answer = await live.http.post(path, content=content, headers={**JSON, **headers})
    body = answer.json()
    assert (answer.status_code, (body.get("error") or body)["code"]) == (status, code)
    assert "evil" not in answer.text


async def test_a_body_without_a_length_is_measured(live: Server) -> None:
    async def chunks():  # type: ignore[no-untyped-def]
        for _ in range(20):
            yield b" " * (1 << 16)

    answer = await live.http.post(SESSIONS, content=chunks(), headers=JSON)
    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")


async def test_own_pages_and_other_clients_may_write(live: Server) -> None:
    for headers in ({}, {"origin": live.url}, {"content-type": "application/json; charset=utf-8"}):
        answer = await live.http.post(SESSIONS, content=b"{}", headers={**JSON, **headers})
        assert answer.status_code == 201


async def test_reads_do_not_need_an_origin(live: Server) -> None:
    answer = await live.http.get(SESSIONS, headers={"origin": "https://evil.example"})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"Origin": "https://evil.example"}, 403), ({"Origin": "null"}, 403), ({"Host": "evil.example"}, 421)],
)
async def test_sockets_are_refused_before_they_open(live: Server, headers: dict[str, str], status: int) -> None:
    if "Host" in headers:
        port = int(live.url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        lines = ["GET /api/v1/ws HTTP/1.1", "Host: evil.example", "Upgrade: websocket", "Connection: Upgrade"]
        lines += ["Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Version: 13", "", ""]
        writer.write("\r\n".join(lines).encode())
        assert f" {status} " in (await reader.readline()).decode()
        writer.close()
        return
    with pytest.raises(InvalidStatus) as refused:
        async with live.raw_socket(additional_headers=headers):
            pass
    answer = refused.value.response
    assert (answer.status_code, answer.headers["x-content-type-options"]) == (status, "nosniff")
    assert answer.headers["x-request-id"]
    assert json.loads(refused.value.response.body or b"")["code"] == "origin_not_allowed"


async def test_own_pages_may_open_sockets(live: Server) -> None:
    async with live.raw_socket(additional_headers={"Origin": live.url}) as socket:
        assert socket.raw.subprotocol == "chat.v1"


@pytest.mark.parametrize(("given", "kept"), [("abc-1.2_3", True), ("a b", False), ("x" * 65, False), (None, False)])
async def test_request_ids(live: Server, given: str | None, kept: bool) -> None:
    answer = await live.http.get("/health", headers={} if given is None else {"X-Request-Id": given})
    found = answer.headers["x-request-id"]
    assert (found == given) if kept else found.startswith("req_")


async def test_pages_are_cached_by_name_and_compressed(tmp_path: Path) -> None:
    (tmp_path / "dist" / "assets").mkdir(parents=True)
    (tmp_path / "dist" / "index.html").write_text("<p>hi</p>" * 100)
    (tmp_path / "dist" / "assets" / "a-1.js").write_text("let a = 1;\n" * 100)
    (tmp_path / "secret.txt").write_text("secret")
    async with serving(tmp_path, pages=tmp_path / "dist") as server:
        page = await server.http.get("/")
        assert (page.text, page.headers["cache-control"]) == ("<p>hi</p>" * 100, "no-cache")
        assert page.headers["content-encoding"] == "gzip"
        assert "script-src 'self'" in page.headers["content-security-policy"]
        again = await server.http.get("/", headers={"If-None-Match": page.headers["etag"]})
        assert again.status_code == 304
        plain = await server.http.get("/assets/a-1.js", headers={"Accept-Encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert "immutable" in plain.headers["cache-control"]
        assert "javascript" in plain.headers["content-type"]
        for name in ("missing.js", "..%2f..%2fsecret.txt", "%2e%2e/index.html", "a%00.js", ".hidden"):
            assert (await server.http.get(f"/assets/{name}")).status_code == 404
        (tmp_path / "dist" / "index.html").unlink()
        assert "not built" in (await server.http.get("/")).text
