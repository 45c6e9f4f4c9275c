"""Launch Chromium for the tests, controlled by Playwright."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Dialog,
    Page,
    ViewportSize,
    sync_playwright,
)
from playwright.sync_api import Request as Sent

VIEWPORT: ViewportSize = {"width": 1280, "height": 800}
BROWSER_NAMES = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome-stable",
    "google-chrome",
)
OPTIONS = (
    "--no-sandbox",  # which needs privileges that root in a container does not have
    "--disable-gpu",  # there is none, and emulating one takes longer
    "--in-process-gpu",
    "--renderer-process-limit=1",
)
INSTALL_HINT = (
    "no Chromium on this machine; 'make chromium' installs Debian's as root, or set KEDGE_CHROMIUM"
)


def find_chromium() -> str | None:
    """Return the path of Chromium from KEDGE_CHROMIUM or PATH, or None."""
    override = os.environ.get("KEDGE_CHROMIUM")
    return override or next((path for path in map(shutil.which, BROWSER_NAMES) if path), None)


@contextmanager
def launch_chromium() -> Iterator[Browser]:
    """Yield a browser; without Chromium, skip the test, or fail it in CI."""
    path = find_chromium()
    if path is None:
        if os.environ.get("CI") == "true":
            pytest.fail(INSTALL_HINT)
        pytest.skip(INSTALL_HINT)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_context(browser: Browser, **settings: Any) -> Iterator[BrowserContext]:
    """Yield a browser context and close its tabs; a context with settings is not shared with other tests."""
    if settings:
        context = browser.new_context(**{"viewport": VIEWPORT, **settings})
        try:
            yield context
        finally:
            context.close()
        return
    context = browser.contexts[0]
    try:
        yield context
    finally:
        for tab in context.pages[1:]:
            tab.close()
        context.clear_cookies()


class WatchedTab:
    """A tab that records unexpected events: errors, dialogs and requests to other hosts."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.url = url
        self.problems: list[str] = []
        self.tab: Page = context.new_page()
        self.tab.set_default_timeout(120_000)
        self.tab.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.tab.on("console", self._on_console)
        self.tab.on("dialog", self._on_dialog)
        self.tab.on("request", self._on_request)

    def open(self, path: str) -> Page:
        """Open a path of the page and return the tab."""
        self.tab.goto(self.url + path)
        return self.tab

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"console: {message.text}")

    def _on_dialog(self, dialog: Dialog) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _on_request(self, request: Sent) -> None:
        if not request.url.startswith((self.url, "data:")):
            self.problems.append(f"request: {request.url}")
