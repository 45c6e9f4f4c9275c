"""Fixture of the browser."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from web.browser.chromium import VIEWPORT, launch_chromium


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Yield one browser for all tests of this package, with the context that ``open_context`` shares."""
    with launch_chromium() as opened:
        # Other tabs of the same site reuse this tab's renderer process; starting one takes longer than a test.
        background = opened.new_context(viewport=VIEWPORT).new_page()
        background.route("**", lambda route: route.fulfill(body=""))
        background.goto("http://127.0.0.1/")
        yield opened
