"""What a user does every day, in Chromium: type, copy, regenerate, change between conversations, read figures."""

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from kedge.turns import assistant, user
from web.browser.conftest import OpenTab
from web.conftest import PageServer

TYPED = "tell me a joke about cats? / just kidding"
CODE = "def area(radius):\n    return 3.14 * radius ** 2  # approximate\n"
ANSWER = f"Use **this**:\n\n```python\n{CODE}```\n"
PHONE = {"viewport": {"width": 390, "height": 800}, "is_mobile": True, "has_touch": True}


@pytest.fixture
def settings() -> dict[str, Any]:
    """Return the settings of a context that may read the clipboard."""
    return {"permissions": ["clipboard-read", "clipboard-write"]}


def read_theme(tab: Page) -> str:
    """Return the color of the page's ground."""
    return tab.evaluate("getComputedStyle(document.documentElement).backgroundColor")


@pytest.mark.parametrize("selector", ["", ".rows a"])
def test_shortcuts_take_no_text(page: PageServer, open_tab: OpenTab, selector: str) -> None:
    """Text typed in an existing conversation is a message, whatever was clicked before."""
    tab = open_tab(page, f"/conversations/{page.create_conversation('First', 'Second')}")
    before = read_theme(tab)
    if selector:
        tab.locator(selector).first.click()
        expect(tab.locator("[data-exchange]")).to_have_count(1)
    tab.keyboard.type(TYPED)
    expect(tab.get_by_label("Your message")).to_have_value(TYPED)
    assert read_theme(tab) == before
    expect(tab.get_by_role("dialog")).to_have_count(0)


def test_answer_is_regenerated_on_a_new_branch(page: PageServer, open_tab: OpenTab) -> None:
    """Regenerate sends the question again; the first answer remains on its branch."""
    tab = open_tab(page, f"/conversations/{page.create_conversation('Hello', 'What is 6*7?')}")
    last = tab.locator("[data-exchange]").last
    last.hover()
    last.get_by_role("button", name="Regenerate").click()
    expect(tab.locator(".rows li")).to_have_count(3)
    expect(tab.locator("[data-exchange]")).to_have_count(2)
    expect(tab.locator(".said.assistant .prose").last).to_have_text("6*7 = 42.")
    expect(tab.locator(".rows [aria-current]")).to_contain_text("head")


def test_answer_and_code_are_copied(page: PageServer, open_tab: OpenTab) -> None:
    """An answer is copied as Markdown, a code block without its fences."""
    name = page.create_conversation(blocks=[user("How?"), assistant(ANSWER)])
    tab = open_tab(page, f"/conversations/{name}")
    answer = tab.locator(".said.assistant")
    answer.hover()
    answer.get_by_role("button", name="Copy", exact=True).click()
    expect(tab.get_by_text("Copied", exact=True)).to_be_visible()
    assert tab.evaluate("navigator.clipboard.readText()") == ANSWER
    answer.get_by_role("button", name="Copy code").click()
    tab.wait_for_function(
        "text => navigator.clipboard.readText().then(each => each === text)", arg=CODE
    )


@pytest.mark.parametrize("settings", [PHONE])
def test_toast_does_not_cover_the_composer(page: PageServer, open_tab: OpenTab) -> None:
    """A notification leaves the composer of a phone visible."""
    tab = open_tab(page, f"/conversations/{page.create_conversation('Hello')}")
    files = [{"name": "setup.exe", "mimeType": "application/x-msdownload", "buffer": b"MZ"}]
    tab.locator("[data-attach]").set_input_files(files)  # pyright: ignore[reportArgumentType]
    toast, composer = tab.locator("#toast"), tab.locator("[data-composer]")
    expect(toast).to_contain_text("cannot be attached")
    shown, below = toast.bounding_box(), composer.bounding_box()
    assert shown
    assert below
    assert shown["y"] + shown["height"] <= below["y"]
