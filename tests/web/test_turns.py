"""Questions are answered by the real model, stopped, and followed through reloads, cut lines and other tabs."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import BrowserContext, Page, WebSocketRoute, expect

from tests.web.chat_page import ChatPage, letters

pytestmark = pytest.mark.asyncio(loop_scope="session")

SHORT = {"max_tokens": 8, "temperature": 0}
ENDLESS = {"max_tokens": 2000, "temperature": 0, "ignore_eos": True}
STORY = "Tell me a long story about a lighthouse."


async def test_second_turn_is_answered_from_the_cache(page: Page, chat: ChatPage) -> None:
    await chat.open_session(params=SHORT)
    await chat.answered("Say hello to my friend Anna.")
    await expect(chat.answer).to_contain_text(
        re.compile(r"prompt [\d,]+ \(cached [\d,]+\) · TTFT [\d.]+ m?s · [\d.]+ tok/s")
    )
    await chat.answered("Now say goodbye.", answers=2)
    await expect(chat.answer).to_contain_text(re.compile(r"\(cached [1-9][\d,]*\)"))
    await expect(chat.answer.locator(".markdown")).to_have_text(re.compile(r"\w"))
    await expect(chat.session_links.first).to_contain_text("Say hello to my friend Anna.")


async def test_new_chat_gets_an_address_and_a_title(page: Page, chat: ChatPage) -> None:
    await chat.goto()
    await page.get_by_text("System prompt").click()
    await page.get_by_role("textbox", name="System prompt").fill("You answer with one word.")
    await chat.send("What is the capital of France?")
    await expect(page).to_have_url(re.compile(r"#/c/ses_"))
    await expect(page).to_have_title(re.compile("What is the capital of France"))
    await expect(chat.composer).to_have_value("")
    await expect(page.get_by_role("log").get_by_text("You answer with one word.")).to_be_attached()
    await expect(chat.answer.locator(".markdown")).to_have_text(re.compile(r"\w"))
    await chat.ended()


@pytest.mark.parametrize("how", ["button", "Escape"])
async def test_stop_keeps_the_text(page: Page, chat: ChatPage, how: str) -> None:
    session = await chat.open_session(params=ENDLESS)
    await chat.send(STORY)
    shown = await chat.streaming_text()
    if how == "button":
        await chat.stop_button.click()
    else:
        await page.keyboard.press(how)
    await chat.ended()
    await expect(chat.answer).to_contain_text("Stopped by you")
    await expect(chat.send_button).to_be_visible()
    stored = await chat.stored_answer(session)
    assert stored["status"] == "cancelled"
    assert letters(stored["content"]).startswith(shown)


async def goes_on_and_is_whole(chat: ChatPage, session: str, before: str) -> None:
    """The answer grows beyond `before`; stopped, it is what the server stored, with no gap and nothing twice."""
    await chat.grown(before)
    await chat.stop_button.click()
    await chat.ended()
    stored = letters((await chat.stored_answer(session))["content"])
    assert letters(await chat.answer.locator(".markdown").inner_text()) == stored
    assert stored.startswith(before)
    await expect(chat.answers).to_have_count(1)


async def test_reload_in_mid_answer_goes_on(page: Page, chat: ChatPage) -> None:
    session = await chat.open_session(params=ENDLESS)
    await chat.send(STORY)
    before = await chat.streaming_text()
    await page.reload()
    await goes_on_and_is_whole(chat, session, before)


async def test_cut_line_goes_on_without_gap_or_double(page: Page, chat: ChatPage) -> None:
    sockets: list[WebSocketRoute] = []
    hellos: list[str] = []

    def relay(page_side: WebSocketRoute) -> None:
        server_side = page_side.connect_to_server()

        def upstream(message: str | bytes) -> None:
            if '"hello"' in str(message):
                hellos.append(str(message))
            server_side.send(message)

        page_side.on_message(upstream)
        sockets.append(page_side)

    await page.route_web_socket(re.compile("/api/v1/ws$"), relay)
    session = await chat.open_session(params=ENDLESS)
    await chat.send(STORY)
    before = await chat.streaming_text()
    await sockets[-1].close()
    await goes_on_and_is_whole(chat, session, before)
    assert len(hellos) == 2
    assert re.search(r'"last_seq":[1-9]', hellos[-1])


async def test_a_stop_without_a_line_is_sent_when_it_is_back(page: Page, chat: ChatPage) -> None:
    sockets: list[WebSocketRoute] = []

    def relay(page_side: WebSocketRoute) -> None:
        page_side.connect_to_server()
        sockets.append(page_side)

    await page.route_web_socket(re.compile("/api/v1/ws$"), relay)
    session = await chat.open_session(params=ENDLESS)
    await chat.send(STORY)
    await chat.streaming_text()
    await sockets[-1].close()
    await chat.stop_button.click()
    await chat.ended()
    assert (await chat.stored_answer(session))["status"] == "cancelled"


async def test_two_tabs_show_the_same_chat_live(context: BrowserContext, chat: ChatPage) -> None:
    session = await chat.open_session(params=ENDLESS)
    other = ChatPage(await context.new_page())
    await other.goto(session)
    await chat.send(STORY)
    await expect(other.questions).to_have_text([STORY])
    await other.streaming_text()
    await other.stop_button.click()
    for tab in (chat, other):
        await tab.ended()
        await expect(tab.answer).to_contain_text("Stopped by you")
    assert await chat.answer.inner_text() == await other.answer.inner_text()
    await chat.page.get_by_role("button", name=f"Delete “{STORY}”").first.click()
    await chat.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    await expect(other.page.get_by_text("This chat does not exist, or it was deleted.")).to_be_visible()
    await expect(chat.page.get_by_role("heading", name="What is on your mind?")).to_be_visible()


async def test_an_answer_goes_on_while_another_chat_is_open(page: Page, chat: ChatPage) -> None:
    generations: set[str] = set()

    def note(frame: str | bytes) -> None:
        generations.update(re.findall(r"gen_\w+", str(frame)))

    page.on("websocket", lambda socket: socket.on("framereceived", note))
    await chat.open_session(params=ENDLESS)
    await chat.send(STORY)
    before = await chat.streaming_text()
    await page.get_by_role("button", name="New chat").first.click()
    running = chat.session_links.first
    await expect(running).to_contain_text("Answering")
    (generation,) = generations
    await page.request.post(f"/api/v1/generations/{generation}/cancel", data={})
    await expect(running).to_contain_text("New answer")
    await running.click()
    await chat.ended()
    assert letters(await chat.answer.locator(".markdown").inner_text()).startswith(before)
    await expect(running).not_to_contain_text("New answer")


async def test_the_reader_may_scroll_up_while_an_answer_runs(page: Page, chat: ChatPage) -> None:
    await page.set_viewport_size({"width": 900, "height": 360})
    await chat.open_session(params=ENDLESS)
    await chat.send(STORY + "\n" * 12 + "Thank you.")
    before = await chat.streaming_text()
    jump = page.get_by_role("button", name="Jump to latest")
    await expect(jump).to_be_hidden()
    await page.get_by_role("log").hover()
    await page.mouse.wheel(0, -400)
    await expect(jump).to_be_visible()
    await chat.grown(before)
    await chat.stop_button.click()
    await chat.ended()
    await expect(jump).to_be_visible()
    await jump.click()
    await expect(jump).to_be_hidden()
    await expect(chat.answer.get_by_text("TTFT")).to_be_in_viewport()
