"""Fixtures of the browser, and of tabs in which nothing unexpected may happen."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from web.browser.chromium import VIEWPORT, WatchedTab, launch_chromium, open_context
from web.conftest import PageServer

expect.set_options(timeout=120_000)

OpenTab = Callable[[PageServer, str], Page]


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Yield one browser for all tests of this package, with the context that ``open_context`` shares."""
    with launch_chromium() as opened:
        # Other tabs of the same site reuse this tab's renderer process; starting one takes longer than a test.
        background = opened.new_context(viewport=VIEWPORT).new_page()
        background.route("**", lambda route: route.fulfill(body=""))
        background.goto("http://127.0.0.1/")
        yield opened


@pytest.fixture
def settings() -> dict[str, Any]:
    """Return the settings of the context of a test; a test may have others as its parameter."""
    return {}


@pytest.fixture
def open_tab(browser: Browser, settings: dict[str, Any]) -> Iterator[OpenTab]:
    """Yield a function that opens a path of a page; the test fails if a tab records a problem.

    A test requests it after a page of its own, which is stopped when the tabs are closed.
    """
    tabs: list[WatchedTab] = []
    with open_context(browser, **settings) as context:

        def open_path(page: PageServer, path: str) -> Page:
            tabs.append(WatchedTab(context, page.url))
            tab = tabs[-1].open(path)
            tab.wait_for_load_state()
            return tab

        yield open_path
    assert [tab.problems for tab in tabs if tab.problems] == []


def send(tab: Page, text: str) -> None:
    """Send a message."""
    tab.get_by_label("Your message").fill(text)
    tab.keyboard.press("Enter")
