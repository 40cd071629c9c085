"""What stands in a message cannot act on the page."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.async_api import Page, Route, expect

from tests.web.chat_page import ChatPage

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOSTILE = """<img src=x onerror="window.hacked = 1"> <script>window.hacked = 1</script>

[click](javascript:window.hacked=1) ![pixel](https://example.org/pixel.png) [fine](https://example.org/)

```html
<b onclick="window.hacked = 1">code</b>
```

| a |
|--:|
| <svg onload="window.hacked = 1"> |
"""


async def answer_with(page: Page, content: str) -> None:
    """Every stored answer that the page reads is `content`."""

    async def replace(route: Route) -> None:
        response = await route.fetch()
        body: dict[str, Any] = await response.json()
        for message in body["data"]:
            if message["role"] == "assistant":
                message["content"] = content
        await route.fulfill(response=response, body=json.dumps(body))

    await page.route("**/messages", replace)


async def test_hostile_text_stays_text(page: Page, chat: ChatPage) -> None:
    requests: list[str] = []
    dialogs: list[str] = []
    problems: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    await chat.open_session(params={"max_tokens": 4, "temperature": 0})
    await chat.answered(HOSTILE)
    await answer_with(page, HOSTILE)
    await page.reload()
    await expect(chat.questions).to_have_text([HOSTILE.strip()])
    await expect(chat.answer).to_contain_text('<img src=x onerror="window.hacked = 1">')
    await expect(chat.answer).to_contain_text('<svg onload="window.hacked = 1">')
    log = page.get_by_role("log")
    await expect(log.locator("img, script, svg, b")).to_have_count(0)
    hrefs = await log.get_by_role("link").evaluate_all("(links) => links.map((a) => [a.href, a.rel])")
    assert hrefs == [[url, "noopener noreferrer"] for url in ("https://example.org/pixel.png", "https://example.org/")]
    assert await page.evaluate("window.hacked") is None
    assert not any("example.org" in url for url in requests)
    assert dialogs == []
    assert problems == []


async def test_code_is_copied_exactly(page: Page, chat: ChatPage) -> None:
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await chat.open_session(params={"max_tokens": 4, "temperature": 0})
    await chat.answered("Hello!")
    await answer_with(page, "Look:\n\n```python\nif a < b:\n    print('&amp;')\n```\n")
    await page.reload()
    await chat.answer.get_by_role("button", name="Copy").click()
    await expect(chat.answer.get_by_role("button", name="Copied")).to_be_visible()
    assert await page.evaluate("navigator.clipboard.readText()") == "if a < b:\n    print('&amp;')\n"


async def test_an_unknown_chat_says_so(page: Page, chat: ChatPage) -> None:
    await chat.goto("ses_00000000000000000000000000")
    await expect(page.get_by_text("This chat does not exist, or it was deleted.")).to_be_visible()
    await expect(chat.composer).to_be_hidden()
    await page.get_by_role("button", name="Start a new chat").click()
    await expect(chat.composer).to_be_visible()


async def test_delete_asks_first(page: Page, chat: ChatPage) -> None:
    session = await chat.open_session(title="To be deleted")
    row = chat.session_links.filter(has_text="To be deleted").first
    await row.hover()
    await page.get_by_role("button", name="Delete “To be deleted”").first.click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_role("button", name="Cancel").click()
    await expect(dialog).to_be_hidden()
    assert (await page.request.get(f"/api/v1/sessions/{session}")).status == 200
    await page.get_by_role("button", name="Delete “To be deleted”").first.click()
    await dialog.get_by_role("button", name="Delete").click()
    await expect(page.get_by_role("heading", name="What is on your mind?")).to_be_visible()
    assert (await page.request.get(f"/api/v1/sessions/{session}")).status == 404
