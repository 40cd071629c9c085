"""Starting, draining and stopping."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from pathlib import Path

import pytest

from chatd.failure import CommandFailed
from chatd.server import bind
from engine.api import Engine
from engine.errors import ModelError
from tests.chatd.harness import Engines, serving, sse

CHAT = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}


async def test_everything_but_turns_works_while_the_model_loads(tmp_path: Path) -> None:
    engine, loaded = Engines(), threading.Event()

    def load() -> Engine:
        loaded.wait(10)
        return engine

    async with serving(tmp_path, engine, loader=load) as server:
        ready = await server.http.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "loading"})
        assert (await server.http.get("/health")).status_code == 200
        assert (await server.http.get("/")).status_code == 200
        assert (await server.http.get("/metrics")).status_code == 200
        assert (await server.http.get("/api/v1/info")).json()["context_length"] is None
        session = await server.session()
        early = await server.http.post(f"/api/v1/sessions/{session}/messages", json={"content": "hi"})
        assert (early.status_code, early.json()["code"], early.headers["retry-after"]) == (503, "model_loading", "2")
        early = await server.http.post("/v1/chat/completions", json=CHAT)
        assert (early.status_code, early.json()["error"]["code"]) == (503, "model_loading")
        async with server.subscribed(session) as socket:
            await socket.send(type="message.create", id="m", session=session, data={"content": "hi"})
            error = await socket.until("error", re="m")
            assert (error["data"]["code"], error["data"]["retryable"]) == ("model_loading", True)
            loaded.set()
            await server.backend.loading
            assert (await server.http.get("/ready")).json() == {"status": "ready"}
            await socket.send(type="message.create", id="n", session=session, data={"content": "hi"})
            await socket.until("ack", re="n")
        assert (await server.http.get("/api/v1/info")).json()["context_length"] == 4096


async def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    def load() -> Engine:
        raise ModelError("no such model")

    async with serving(tmp_path, loader=load) as server:
        with pytest.raises(ModelError):
            await server.backend.loading
        assert (await server.http.get("/ready")).json() == {"status": "failed"}
        answer = await server.http.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unavailable")


async def test_an_engine_that_has_ended_by_a_fault(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        await server.backend.loading
        server.engine.broken = True
        ready = await server.http.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "failed"})
        answer = await server.http.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")


async def test_a_shutdown_gives_grace_then_interrupts_and_keeps_the_text(tmp_path: Path) -> None:
    async with serving(tmp_path, shutdown_grace_s=30) as server:
        quick, slow = await server.session(), await server.session()
        async with server.subscribed(quick) as first, server.subscribed(slow) as second:
            await server.start(quick)
            in_time = server.engine.latest
            slow_gid = (await server.start(slow))["generation"]["id"]
            late = server.engine.latest
            for engine in (in_time, late):
                engine.admit()
                engine.say("so far")
            hurry = asyncio.Event()
            draining = asyncio.create_task(server.backend.drain(hurry))
            await first.until("server.draining")
            refused = await server.http.post(f"/api/v1/sessions/{quick}/messages", json={"content": "more"})
            assert (refused.status_code, refused.json()["code"]) == (503, "shutting_down")
            assert (await server.http.get("/ready")).json() == {"status": "draining"}
            in_time.finish()
            assert (await first.until("generation.done"))["data"]["status"] == "complete"
            hurry.set()
            assert (await second.until("generation.done"))["data"]["status"] == "interrupted"
            assert (await first.closed(), await second.closed()) == (1012, 1012)
            await draining
        assert (await server.http.get(f"/api/v1/generations/{slow_gid}")).json()["status"] == "interrupted"
        reply = (await server.http.get(f"/api/v1/sessions/{slow}/messages")).json()["data"][1]
        assert (reply["content"], reply["status"]) == ("so far", "interrupted")


async def test_a_shutdown_ends_completions_with_an_error(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        async with server.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            events = sse(response)
            await anext(events)
            await server.backend.drain()
            last = [json.loads(event["data"]) async for event in events]
        assert [chunk["error"]["code"] for chunk in last] == ["shutdown"]


async def test_a_second_server_on_the_same_data_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path):
        with pytest.raises(CommandFailed, match="in use by another process"):
            async with serving(tmp_path):
                pass


def test_a_used_port_is_told_at_once() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CommandFailed, match=rf"cannot listen on 127\.0\.0\.1 port {port}: Address already in use"):
            bind("127.0.0.1", port)


def test_an_address_of_another_machine_is_told() -> None:
    with pytest.raises(CommandFailed, match=r"cannot listen on 192\.0\.2\.1"):
        bind("192.0.2.1", 0)


async def test_every_request_leaves_one_line_and_its_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engines(reply=lambda request: "hi")
    with caplog.at_level(logging.INFO, "chatd.observe"):
        async with serving(tmp_path, engine) as server:
            session = await server.session()
            async with server.subscribed(session) as socket:
                await socket.send(type="message.create", id="m", session=session, data={"content": "hello"})
                await socket.until("generation.done")
            await server.http.post("/v1/chat/completions", json=CHAT)
            await server.start(session, "bye")
            engine.reply = None
            asking = asyncio.create_task(server.http.post("/v1/chat/completions", json=CHAT))
            (await engine.next_request(4)).fail()
            await asking
            metrics = dict(
                line.rsplit(" ", 1)
                for line in (await server.http.get("/metrics")).text.splitlines()
                if not line.startswith("#")
            )
    lines = [record.getMessage() for record in caplog.records if record.name == "chatd.observe"]
    assert len(lines) == 4
    assert f"session={session} prompt=24 cached=0 prefilled=24 generated=3 queue_ms=1.0" in lines[0]
    for field in ("prefill_ms_per_token=0.08", "decode_ms_per_token=1.50", "ttft_ms=4.0", "drafted=8", "accepted=5"):
        assert field in lines[0]
    assert lines[0].endswith("finish_reason=stop miss=cold")
    assert "session=- prompt=24 cached=16 prefilled=8" in lines[1]
    assert "failed=boom" in lines[3]
    prompt_tokens = sum(len(live.request.tokens) for live in engine.all[:3])
    assert float(metrics["chatd_prompt_tokens_total"]) == prompt_tokens
    assert float(metrics["chatd_cached_tokens_total"]) == sum(live.cached for live in engine.all)
    assert float(metrics["chatd_generated_tokens_total"]) == sum(len(live.output) for live in engine.all[:3])
    assert (float(metrics["chatd_drafted_tokens_total"]), float(metrics["chatd_accepted_tokens_total"])) == (24, 15)
    assert float(metrics['chatd_requests_total{finish_reason="stop"}']) == 3
    assert float(metrics['chatd_requests_total{finish_reason="failed"}']) == 1
    for name in ("time_to_first_token", "time_per_output_token", "queue", "prefill", "decode"):
        assert float(metrics[f"chatd_{name}_seconds_count"]) == 3
    assert float(metrics["chatd_time_to_first_token_seconds_sum"]) == pytest.approx(0.012)
    assert float(metrics['chatd_pages{state="free"}']) == 1024
    assert float(metrics["chatd_requests_running"]) == 0
