"""The chat page as a user sees it: by role and label, never by markup."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from playwright.async_api import Locator, Page, expect

ANSWER_TIMEOUT_MS = 60_000


@dataclass(frozen=True)
class ChatPage:
    page: Page

    @property
    def composer(self) -> Locator:
        return self.page.get_by_role("textbox", name="Message")

    @property
    def send_button(self) -> Locator:
        return self.page.get_by_role("button", name="Send", exact=True)

    @property
    def stop_button(self) -> Locator:
        return self.page.get_by_role("button", name=re.compile("^Stop"))

    @property
    def questions(self) -> Locator:
        return self.page.get_by_role("article", name="You said")

    @property
    def answers(self) -> Locator:
        return self.page.get_by_role("article", name="Answer")

    @property
    def answer(self) -> Locator:
        """The last answer."""
        return self.answers.last

    @property
    def session_links(self) -> Locator:
        return self.page.get_by_role("navigation", name="Chats").get_by_role("link")

    async def create_session(self, **fields: Any) -> str:
        response = await self.page.request.post("/api/v1/sessions", data=fields)
        assert response.status == 201, await response.text()
        session: str = (await response.json())["id"]
        return session

    async def open_session(self, **fields: Any) -> str:
        """A session made over REST (so that its sampling is fixed), opened in the page and ready to send in."""
        session = await self.create_session(**fields)
        await self.goto(session)
        return session

    async def goto(self, session: str | None = None) -> None:
        await self.page.goto("/" if session is None else f"/#/c/{session}")
        await self.connected()

    async def connected(self) -> None:
        await expect(self.page.get_by_role("status").filter(has_text="Connected")).to_be_attached()

    async def send(self, text: str) -> None:
        await self.composer.fill(text)
        await expect(self.send_button).to_be_enabled()
        await self.composer.press("Enter")

    async def answered(self, text: str, answers: int = 1) -> None:
        await self.send(text)
        await expect(self.answers).to_have_count(answers)
        await self.ended()

    async def ended(self) -> None:
        await expect(self.answer).to_have_attribute("aria-busy", "false", timeout=ANSWER_TIMEOUT_MS)

    async def streaming_text(self) -> str:
        """The text of the running answer, once some of it is there."""
        await expect(self.answer.locator(".markdown")).to_have_text(re.compile(r"\w.*\w"), timeout=ANSWER_TIMEOUT_MS)
        await expect(self.answer).to_have_attribute("aria-busy", "true")
        return letters(await self.answer.locator(".markdown").inner_text())

    async def grown(self, before: str) -> None:
        """Waits until the answer shows more letters than `before`."""
        shown = self.answer.locator(".markdown")
        await expect(shown).to_have_text(
            re.compile(rf"([^A-Za-z]*[A-Za-z]){{{len(before) + 1},}}"), timeout=ANSWER_TIMEOUT_MS
        )

    async def stored_answer(self, session: str) -> dict[str, Any]:
        response = await self.page.request.get(f"/api/v1/sessions/{session}/messages")
        answer: dict[str, Any] = (await response.json())["data"][-1]
        return answer


def letters(text: str) -> str:
    """What Markdown leaves alone in a text: its letters."""
    return re.sub(r"[^A-Za-z]", "", text)
