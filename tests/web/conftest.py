"""A real Chromium for the page's tests; the server comes from the fixture `server_url`."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page, async_playwright

from tests.web.chat_page import ChatPage

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def chromium_path() -> str:
    named = os.environ.get("CHATD_TEST_CHROMIUM")
    found = named or next((path for path in map(shutil.which, CHROMIUM_NAMES) if path), None)
    if found is None:
        reason = f"no Chromium: set CHATD_TEST_CHROMIUM or install one of {', '.join(CHROMIUM_NAMES)}"
        if os.environ.get("CHATD_TEST_REQUIRE_SERVICES") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser(chromium_path: str) -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium_path, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="session")
async def context(browser: Browser, server_url: str) -> AsyncIterator[BrowserContext]:
    context = await browser.new_context(base_url=server_url, locale="en-US")
    context.set_default_timeout(30_000)
    yield context
    await context.close()


@pytest_asyncio.fixture(loop_scope="session")
async def page(context: BrowserContext) -> Page:
    return await context.new_page()


@pytest.fixture
def chat(page: Page) -> ChatPage:
    return ChatPage(page)
