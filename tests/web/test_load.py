"""The page loads cleanly, small, and fits the screen and the eye."""

from __future__ import annotations

import gzip
import re

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, Response, expect

from tests.web.chat_page import ChatPage

pytestmark = pytest.mark.asyncio(loop_scope="session")

FIRST_LOAD_BYTES = 150_000


async def test_loads_without_errors_or_policy_violations(page: Page, chat: ChatPage) -> None:
    problems: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            problems.append(message.text)

    page.on("console", note)
    page.on("pageerror", lambda error: problems.append(str(error)))
    await page.add_init_script(
        "addEventListener('securitypolicyviolation', (e) => console.error(`policy: ${e.violatedDirective}`))"
    )
    response = await page.goto("/")
    await chat.connected()
    await expect(page.get_by_role("heading", name="What is on your mind?")).to_be_visible()
    policy = response.headers["content-security-policy"] if response else ""
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert problems == []


async def test_first_load_is_small_and_from_here(page: Page, chat: ChatPage, server_url: str) -> None:
    responses: list[Response] = []
    page.on("response", lambda response: responses.append(response))
    await chat.goto()
    assert all(response.url.startswith(server_url) for response in responses)
    files = [
        response for response in responses if response.request.resource_type in ("document", "script", "stylesheet")
    ]
    size = sum([len(gzip.compress(await response.body())) for response in files])
    assert 10_000 < size < FIRST_LOAD_BYTES


@pytest.mark.parametrize("system", ["light", "dark"])
async def test_theme_follows_the_system_until_chosen(page: Page, chat: ChatPage, system: str) -> None:
    async def dark() -> bool:
        red = await page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
        return int(red) < 128

    await page.emulate_media(color_scheme="dark" if system == "dark" else "light")
    await chat.goto()
    assert await dark() == (system == "dark")
    await page.get_by_role("button", name=re.compile("^Use the (dark|light) theme$")).click()
    assert await dark() != (system == "dark")
    await page.reload()
    await chat.connected()
    assert await dark() != (system == "dark")


async def test_an_example_fills_the_composer(page: Page, chat: ChatPage) -> None:
    await chat.goto()
    await page.get_by_role("button", name="Explain").click()
    await expect(chat.composer).to_have_value(re.compile("rainbows"))
    await expect(chat.composer).to_be_focused()


async def test_small_screens_have_a_drawer(browser: Browser, server_url: str) -> None:
    context = await browser.new_context(base_url=server_url, viewport={"width": 390, "height": 780}, locale="en-US")
    page = await context.new_page()
    chat = ChatPage(page)
    session = await chat.create_session(title="In the drawer")
    await chat.goto()
    link = chat.session_links.filter(has_text="In the drawer").first
    await expect(link).not_to_be_in_viewport()
    await page.get_by_role("button", name="Open the list of chats").click()
    await expect(link).to_be_in_viewport()
    await link.click()
    await expect(link).not_to_be_in_viewport()
    await expect(page).to_have_url(re.compile(session))
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    await context.close()
