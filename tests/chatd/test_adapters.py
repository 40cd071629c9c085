"""LoRA adapters as clients see them: models of /v1, a parameter of sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chatd.harness import Engines, Server, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMES = ("ann", "bob.v2")
USER = [{"role": "user", "content": "hello"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def adapted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    engine = Engines(reply=lambda request: "hé", adapters=NAMES)
    settings = [f"{name}=/adapters/{name}" for name in NAMES]
    async with serving(tmp_path_factory.mktemp("adapters"), engine, adapter=settings, served_name="base") as server:
        yield server


async def test_the_model_and_its_adapters_are_listed(adapted: Server) -> None:
    models = (await adapted.http.get("/v1/models")).json()["data"]
    assert [(model["id"], model.get("parent"), model["object"]) for model in models] == [
        ("base", None, "model"),
        ("ann", "base", "model"),
        ("bob.v2", "base", "model"),
    ]
    assert (await adapted.http.get("/api/v1/info")).json()["adapters"] == ["ann", "bob.v2"]


@pytest.mark.parametrize(
    ("asked", "answered", "adapter"),
    [("base", "base", None), ("default", "base", None), ("ann", "ann", "ann"), ("bob.v2", "bob.v2", "bob.v2")],
)
async def test_a_completion_names_its_model(adapted: Server, asked: str, answered: str, adapter: str | None) -> None:
    answer = await adapted.http.post("/v1/chat/completions", json={"model": asked, "messages": USER})
    assert (answer.status_code, answer.json()["model"]) == (200, answered)
    request = adapted.engine.latest.request
    assert (request.adapter, request.namespace) == (adapter, "")


@pytest.mark.parametrize("asked", ["eve", "", "ANN", "ann "])
async def test_an_unknown_model(adapted: Server, asked: str) -> None:
    answer = await adapted.http.post("/v1/chat/completions", json={"model": asked, "messages": USER})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert error["message"] == "there is no such model; this server has base, also called default, ann, bob.v2"


async def test_a_session_keeps_its_adapter(adapted: Server) -> None:
    session = await adapted.session(params={"adapter": "ann"})
    assert (await adapted.http.get(f"/api/v1/sessions/{session}")).json()["params"] == {"adapter": "ann"}
    for params, expected in ((None, "ann"), ({"adapter": "bob.v2"}, "bob.v2"), ({"adapter": ""}, None)):
        turn = await adapted.start(session, params=params)
        events = f"/api/v1/generations/{turn['generation']['id']}/events"
        assert "generation.done" in (await adapted.http.get(events)).text
        assert adapted.engine.latest.request.adapter == expected


async def test_a_session_cannot_ask_for_an_unknown_one(adapted: Server) -> None:
    session = await adapted.session()
    for path in ("", f"/{session}/messages"):
        body = {"params": {"adapter": "eve"}, **({"content": "x"} if path else {})}
        answer = await adapted.http.post(f"/api/v1/sessions{path}", json=body)
        assert (answer.status_code, answer.json()["errors"]) == (
            422,
            [{"field": "params.adapter", "reason": "names no adapter that is loaded"}],
        )
