"""Take the screenshots of the documentation: the page of a conversation, and the dashboard of a day.

Run it with ``python tests/web/browser/screenshots.py``; it needs Chromium (``make chromium``).
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[2]))

from playwright.sync_api import Page, expect

from kedge import Conversation
from kedge.providers import connect
from kedge.server.models import OutputEvent, PracticeModel, Prompt
from kedge.store import RequestRecord
from kedge.web.service import ConversationService
from web.browser.chromium import VIEWPORT, launch_chromium
from web.conftest import PageServer, serve_page

IMAGES = Path(__file__).parents[3] / "docs" / "images"
HOURS = 24
MANUAL = (
    "Please remember: " + "Rooms have tables, seats, a screen and a door to the corridor. " * 80
)
"""A first message that is long enough to be cached."""
OTHER_TITLES = ("Lighthouses of the coast", "Notes on the release", "Order 4711", "Menu for Friday")
MESSAGES = (
    "Which rooms are free on Friday? Please list each with the number of its seats and what it has.",
    "What is 12*14?",
    "How many messages can you see?",
    "Write 60 words.",
    "What did I say first?",
)


class SlowModel(PracticeModel):
    """The practice model, which thinks for a moment before it answers."""

    def __init__(self) -> None:
        super().__init__()
        self._random = Random(3)

    async def answer(self, prompt: Prompt) -> AsyncIterator[OutputEvent]:
        """Wait, then answer."""
        await asyncio.sleep(self._random.uniform(0.05, 0.25))
        async for event in super().answer(prompt):
            yield event


def compute_price(record: RequestRecord) -> float:
    """Return the cost of a response in dollars."""
    input_tokens = (record.input_tokens or 0) - 0.9 * (record.cached_tokens or 0)
    return (input_tokens + 8 * (record.output_tokens or 0)) * 1.25e-6


def fill_day(page: PageServer) -> None:
    """Create conversations whose requests are spread over the last day."""
    rng = Random(7)
    now = time.time()

    async def talk(service: ConversationService) -> None:
        await hold_conversation(service, now - 3600 * 30)  # before the day: the first one is slow
        for hour in range(HOURS):
            await hold_conversation(service, now - 3600 * (HOURS - hour) + 60)

    async def hold_conversation(service: ConversationService, start: float) -> None:
        clock = [start]
        address = f"responses:{page.url}/v1#practice"
        async with connect(address, clock=lambda: clock[0]) as engine:
            conversation = await Conversation.create(
                engine, store=service.store, price=compute_price
            )
            messages = [rng.choice(MESSAGES) for _ in range(rng.randint(2, 8))]
            for message in (MANUAL, *messages):
                async with conversation.stream(message) as stream:
                    async for _ in stream:
                        pass
                clock[0] += 300

    page.run(talk)


def take_conversation(tab: Page, page: PageServer) -> None:
    """Take the picture of a conversation with a branch, and of the plan of its newest request."""
    for title in OTHER_TITLES:
        page.create_conversation("Hello", title=title)
    name = page.create_conversation(
        "There are 4 tables with 12 seats each.",
        "What is 4*12?",
        "Write 20 words.",
        "What did I say first?",
        title="Seats for the workshop",
        tags=["planning"],
    )
    path = f"/api/conversations/{name}"
    first = page.get(f"{path}/tree")["nodes"][0]["node"]
    page.post(f"{path}/runs", message="And with 5 tables?", at=first)
    page.post(f"{path}/runs", message="What is 5*12?")
    page.post(f"{path}/runs", message="How many messages can you see?")
    tab.goto(f"{page.url}/conversations/{name}")
    card = tab.locator(".plan").last
    card.locator("summary").click()
    expect(card.locator(".plan-detail")).to_be_visible()
    tab.get_by_label("Your message").blur()
    tab.locator(".said.user").last.evaluate("each => each.scrollIntoView({block: 'start'})")
    tab.screenshot(path=IMAGES / "conversation.png")


def take_dashboard(tab: Page, page: PageServer) -> None:
    """Take the picture of the dashboard."""
    tab.goto(f"{page.url}/dashboard")
    expect(tab.get_by_text("live", exact=True)).to_be_visible()
    tab.screenshot(path=IMAGES / "dashboard.png")


def main() -> None:
    """Take all screenshots."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serve_page(Path(folder), model=SlowModel()) as page,
        launch_chromium() as browser,
    ):
        tab = browser.new_context(viewport=VIEWPORT).new_page()
        take_conversation(tab, page)
        fill_day(page)
        take_dashboard(tab, page)


if __name__ == "__main__":
    main()
