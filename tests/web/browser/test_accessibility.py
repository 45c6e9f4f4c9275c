"""Accessibility checks of every page with axe in Chromium: light, dark, and each layout on a phone."""

from collections.abc import Iterator
from importlib.resources import files
from typing import Literal

import pytest
from playwright.sync_api import Browser, expect

from kedge.turns import assistant
from web.browser.chromium import WatchedTab, open_context
from web.conftest import PageServer, serve_page

VARIANTS: tuple[tuple[int, Literal["light", "dark"]], ...] = (
    (1280, "light"),
    (1280, "dark"),
    (375, "light"),
)
NARROW = {"list", "conversation", "plan", "dashboard", "workflow", "request"}
"""The pages that are also checked on a phone: one of each layout."""
AXE = (files("axe_playwright_python") / "axe.min.js").read_text("utf-8")
# Only a rule that is off by default needs the preloaded style sheets.
SUMMARIZE = """async (rules) => (await axe.run({preload: false, resultTypes: ["violations"], ...rules})).violations.map(
  (each) => `${each.id}: ${each.nodes.map((node) => node.target.join(" ")).join(", ")}`)"""
COLOR_RULES = ["color-contrast", "link-in-text-block"]  # axe's "cat.color", as far as it is on
RULES = {"light": {}, "dark": {"runOnly": {"type": "rule", "values": COLOR_RULES}}}
"""The dark scheme changes colors and one icon, at any width, so the rules about anything else are run in light."""


CODE = "# a comment\ndef area(radius: float) -> str:\n    return 'text' if radius > 1.5 else None\n"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PageServer, dict[str, str]]]:
    """Yield a page with a branched conversation, a failed message and a workflow, and the paths to check."""
    with serve_page(tmp_path_factory.mktemp("axe")) as page:
        name = page.create_conversation("Hello", "What is 2+3?", "Please call add with a=2 and b=3")
        path = f"/api/conversations/{name}"
        tree = page.get(f"{path}/tree")
        reply = page.post(f"{path}/runs", message="Other", at=tree["nodes"][0]["node"])
        page.faults.set("status=400", times=1)
        page.client.post(f"{path}/runs", json={"message": "This fails"})
        code = page.create_conversation(blocks=[assistant(f"```python\n{CODE}```")])
        steps = [{"name": "sum", "prompt": "What is 1+1?"}]
        workflow = page.post("/api/workflows", kind="steps", steps=steps)["id"]
        for _ in range(2):
            assert page.client.post(
                "/v1/responses", json={"model": "practice", "input": "Hi"}
            ).is_success
        compared = f"left={reply['node']}&right={tree['head']}"
        path = f"/conversations/{name}"
        paths = {
            **{name: f"/{name}" for name in ("dashboard", "workflows", "requests", "login")},
            "list": "/",
            "search": "/?q=hello",
            "request": "/requests/1",
            "error": "/nowhere",
            "conversation": path,
            "code": f"/conversations/{code}",
            "plan": f"{path}/plans/{reply['node']}",
            "compare": f"{path}/compare?{compared}",
            "workflow": f"/workflows/{workflow}",
        }
        yield page, paths


def test_axe_finds_no_violations(
    browser: Browser, filled: tuple[PageServer, dict[str, str]]
) -> None:
    """No page violates a rule in light, in dark or on a phone, with all details expanded."""
    page, paths = filled
    assert paths.keys() >= NARROW
    problems: dict[str, list[str]] = {}
    with open_context(browser, reduced_motion="reduce") as context:
        watched_tab = WatchedTab(context, page.url)
        for name, path in paths.items():
            tab = watched_tab.open(path)
            script = "all => all.forEach(each => { each.open = true })"
            tab.locator("details").evaluate_all(script)
            if name == "conversation":
                expect(tab.locator(".plan .facts")).to_have_count(3)
            if name == "code":
                expect(tab.locator(".hljs-comment")).to_be_visible()
            tab.evaluate(AXE)
            for width, scheme in VARIANTS if name in NARROW else VARIANTS[:2]:
                tab.set_viewport_size({"width": width, "height": 800})
                tab.emulate_media(color_scheme=scheme)
                if violations := tab.evaluate(SUMMARIZE, RULES[scheme]):
                    problems[f"{name}, {width}, {scheme}"] = violations
    assert problems == {}


def test_phone_opens_at_newest_message(
    browser: Browser, filled: tuple[PageServer, dict[str, str]]
) -> None:
    """On a narrow screen the graph is collapsed and can be expanded."""
    page, paths = filled
    with open_context(browser, viewport={"width": 375, "height": 600}) as context:
        tab = WatchedTab(context, page.url).open(paths["conversation"])
        expect(tab.get_by_text("The request was refused.")).to_be_in_viewport()
        expect(tab.locator(".rows li").first).to_be_hidden()
        tab.get_by_text("Responses", exact=True).click()
        expect(tab.locator(".rows li").first).to_be_visible()
