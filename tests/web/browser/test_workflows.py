"""Starting and following workflows in Chromium."""

from pathlib import Path

from playwright.sync_api import Browser, expect

from server.gated_model import GatedModel
from web.browser.chromium import WatchedTab, open_context
from web.conftest import serve_page


def test_workflow_is_started_and_followed(browser: Browser, tmp_path: Path) -> None:
    """The page shows each answer when it is stored, without a reload."""
    gate = GatedModel()
    with serve_page(tmp_path, model=gate) as page, open_context(browser) as context:
        watched_tab = WatchedTab(context, page.url)
        tab = watched_tab.open("/workflows")
        tab.wait_for_load_state()
        tab.get_by_text("Start a workflow").click()
        tab.get_by_label("Kind").select_option("steps")
        tab.get_by_label("Steps, one in each line").fill("plan: go on\nwrite: wait for {plan}")
        tab.get_by_role("button", name="Start").click()
        expect(tab.get_by_text("answer to go on").first).to_be_visible()
        expect(tab.locator(".page-head .chip.running")).to_be_visible()
        tab.get_by_text("Prompt").click()
        expect(tab.get_by_text("go on", exact=True)).to_be_visible()
        gate.open_gate()
        expect(tab.locator(".page-head .chip.finished")).to_be_visible()
        expect(tab.get_by_role("heading", name="Step 2: write")).to_be_visible()
        expect(tab.get_by_text("go on", exact=True)).to_be_visible()  # still expanded
        assert watched_tab.problems == []
