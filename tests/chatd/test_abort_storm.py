"""Clients that go away at any moment, streaming or not, with one choice or several: nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path

from engine.config import EngineConfig
from engine.loading import load_engine
from engine.local import LocalEngine
from tests.chatd.harness import WITHIN_S, serving
from tests.support.tiny_models import save_tiny

CLIENTS = 200


async def test_clients_that_go_away(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    model.mkdir()
    save_tiny(model, "llama")
    engines: list[LocalEngine] = []

    def load() -> LocalEngine:
        config = EngineConfig(
            tmp_path / "models", str(model), dtype="float32", pool_tokens=320, page_size=4, max_running=8
        )
        engines.append(load_engine(config))
        return engines[0]

    chance, open_at_once = random.Random(5), asyncio.Semaphore(10)
    answered = 0

    async with serving(tmp_path, loader=load) as server:
        await server.backend.loading
        host, port = server.url.removeprefix("http://").split(":")

        async def client(number: int) -> None:
            nonlocal answered
            body = {
                "model": "default",
                "messages": [{"role": "user", "content": "AB" * chance.randint(1, 20)}],
                "stream": chance.random() < 0.5,
                "n": chance.choice((1, 1, 2, 4)),
                "max_tokens": chance.randint(1, 24),
                "ignore_eos": True,
                "seed": number,
            }
            reads = chance.choice((0, 1, 2, 5, 1000))
            content = json.dumps(body).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            async with open_at_once:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
                await writer.drain()
                for _ in range(reads):
                    if not await reader.readline():
                        answered += 1
                        break
                writer.close()

        async with asyncio.timeout(20 * WITHIN_S):
            await asyncio.gather(*(client(number) for number in range(CLIENTS)))
            await server.backend.engine.idle()
        [engine] = engines
        assert await engine.flush()
        engine._cache.check()
        snapshot = engine.snapshot()
        assert (snapshot.running, snapshot.waiting, snapshot.pages.free) == (0, 0, engine.info.num_pages)
        told = (await server.http.get("/metrics")).text
    cancelled, length = (ended(told, reason) for reason in ("cancelled", "length"))
    assert cancelled + length == CLIENTS
    assert cancelled > 0
    assert length >= answered > 0


def ended(metrics: str, reason: str) -> int:
    """How many requests ended so."""
    found = re.search(rf'^chatd_requests_total{{.*"{reason}".*}} (\d+)', metrics, re.MULTILINE)
    assert found is not None, metrics
    return int(found[1])
