"""No text is ever lost: keys, drafts, refused sends, a server that is loading or away."""

from __future__ import annotations

import json
import re

import pytest
from playwright.async_api import Page, Route, WebSocketRoute, expect

from tests.web.chat_page import ChatPage

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = "A text that took a while to write"
SHORT = {"max_tokens": 4, "temperature": 0}


async def test_keys(page: Page, chat: ChatPage) -> None:
    await chat.open_session(params=SHORT)
    await chat.composer.fill("one")
    await chat.composer.press("Shift+Enter")
    await chat.composer.press_sequentially("two")
    for init in ("{isComposing: true}", "{keyCode: 229}"):
        script = (
            f"(field) => field.dispatchEvent(new KeyboardEvent('keydown', {{key: 'Enter', bubbles: true, ...{init}}}))"
        )
        await chat.composer.evaluate(script)
    await expect(chat.composer).to_have_value("one\ntwo")
    await expect(chat.questions).to_have_count(0)
    await chat.composer.press("Enter")
    await expect(chat.questions).to_have_text(["one\ntwo"])
    await expect(chat.composer).to_have_value("")
    await chat.ended()


async def test_each_chat_keeps_its_draft(page: Page, chat: ChatPage) -> None:
    first = await chat.open_session(title="First")
    await chat.composer.fill("draft of the first")
    await chat.open_session(title="Second")
    await expect(chat.composer).to_have_value("")
    await chat.composer.fill("draft of the second")
    await page.reload()
    await expect(chat.composer).to_have_value("draft of the second")
    await chat.goto(first)
    await expect(chat.composer).to_have_value("draft of the first")


async def test_a_refused_send_keeps_the_text(page: Page, chat: ChatPage) -> None:
    def refuse(page_side: WebSocketRoute) -> None:
        server_side = page_side.connect_to_server()

        def upstream(message: str | bytes) -> None:
            frame = json.loads(message)
            if frame["type"] != "message.create":
                server_side.send(message)
                return
            data = {"code": "queue_full", "message": "the queue is full", "retryable": True}
            page_side.send(json.dumps({"type": "error", "re": frame["id"], "data": data}))

        page_side.on_message(upstream)

    await page.route_web_socket(re.compile("/api/v1/ws$"), refuse)
    await chat.open_session()
    await chat.send(TEXT)
    await expect(page.get_by_text(re.compile("Too many requests are waiting"))).to_be_visible()
    await expect(chat.composer).to_have_value(TEXT)
    await expect(chat.send_button).to_be_enabled()
    await page.reload()
    await expect(chat.composer).to_have_value(TEXT)


async def test_a_lost_acknowledgement_makes_one_turn(page: Page, chat: ChatPage) -> None:
    lost: list[str] = []

    def lose_first(page_side: WebSocketRoute) -> None:
        server_side = page_side.connect_to_server()

        async def upstream(message: str | bytes) -> None:
            server_side.send(message)
            if not lost and json.loads(message)["type"] == "message.create":
                lost.append(str(message))

        async def downstream(message: str | bytes) -> None:
            frame = json.loads(message)
            if len(lost) == 1 and frame["type"] in ("ack", "message.created"):
                lost.append(str(message))
                await page_side.close()
            elif len(lost) != 1:
                page_side.send(message)

        page_side.on_message(upstream)
        server_side.on_message(downstream)

    await page.route_web_socket(re.compile("/api/v1/ws$"), lose_first)
    session = await chat.open_session(params=SHORT)
    await chat.send(TEXT)
    await expect(chat.composer).to_have_value("")
    await chat.ended()
    await expect(chat.questions).to_have_text([TEXT])
    response = await page.request.get(f"/api/v1/sessions/{session}/messages")
    assert len((await response.json())["data"]) == 2


async def test_a_new_chat_that_cannot_be_made_keeps_the_text(page: Page, chat: ChatPage) -> None:
    await chat.goto()
    await page.route("**/api/v1/sessions", lambda route: route.abort())
    await chat.send(TEXT)
    await expect(page.get_by_text("The server cannot be reached. Your text is kept.")).to_be_visible()
    await expect(chat.composer).to_have_value(TEXT)


async def test_while_the_model_loads_history_is_readable_and_sending_waits(page: Page, chat: ChatPage) -> None:
    session = await chat.open_session(params=SHORT)
    await chat.answered("Hello!")

    async def loading(route: Route) -> None:
        await route.fulfill(status=503, json={"status": "loading"})

    await page.route("**/ready", loading)
    await page.reload()
    reason = page.get_by_text(re.compile("The model is still loading"))
    await expect(reason).to_be_visible()
    await expect(chat.questions).to_have_text(["Hello!"])
    await chat.composer.fill(TEXT)
    await expect(chat.send_button).to_be_disabled()
    await page.unroute("**/ready")
    await expect(reason).to_be_hidden()
    await expect(chat.send_button).to_be_enabled()
    await expect(chat.composer).to_have_value(TEXT)
    assert session in page.url


async def test_while_the_server_is_away_history_is_readable(page: Page, chat: ChatPage) -> None:
    sockets: list[WebSocketRoute] = []

    def away(page_side: WebSocketRoute) -> None:
        if not sockets:
            page_side.connect_to_server()
        sockets.append(page_side)

    await page.route_web_socket(re.compile("/api/v1/ws$"), away)
    await chat.open_session(params=SHORT)
    await chat.answered("Hello!")
    await page.route("**/ready", lambda route: route.abort())
    await sockets[0].close()
    await expect(page.get_by_text(re.compile("The server cannot be reached"))).to_be_visible()
    await expect(chat.questions).to_have_text(["Hello!"])
    await chat.composer.fill(TEXT)
    await expect(chat.send_button).to_be_disabled()
