"""Edits, comparison and concurrent tabs in Chromium."""

from playwright.sync_api import expect

from server.waiting import wait_until
from web.browser.conftest import OpenTab
from web.conftest import PageServer


def test_edited_message_is_marked(open_tab: OpenTab, page: PageServer) -> None:
    """An edited message is sent as a new branch, and shows its previous text."""
    name = page.create_conversation("Hello", "What is 2+3?", "Thanks")
    tab = open_tab(page, f"/conversations/{name}")
    question = tab.locator(".said.user", has_text="What is 2+3?")
    question.hover()
    question.get_by_role("button", name="Edit").click()
    tab.get_by_role("dialog").get_by_label("Your message").fill("What is 20+3?")
    tab.get_by_role("button", name="Send as a new branch").click()
    expect(tab.locator(".said.assistant .prose").last).to_have_text("20+3 = 23.")
    edited = tab.locator(".said.user", has_text="20+3")
    expect(edited.locator(".chip.edited")).to_be_visible()
    edited.get_by_text("Text before the edit").click()
    expect(edited.locator(".previous .words")).to_have_text("What is 2+3?")


def test_branches_are_compared_side_by_side(open_tab: OpenTab, page: PageServer) -> None:
    """The messages of two branches are beside each other, with the changed words highlighted."""
    name = page.create_conversation("Hello", "What is 2+3?", "Thanks")
    path = f"/api/conversations/{name}"
    first = page.get(f"{path}/tree")["nodes"][0]["node"]
    page.post(f"{path}/runs", message="What is 20+3?", at=first)
    tab = open_tab(page, f"/conversations/{name}")
    tab.get_by_text("Compare").first.click()
    tab.get_by_role("button", name="Compare").click()
    expect(tab.get_by_text("2 messages in common", exact=True)).to_be_visible()
    expect(tab.locator("[data-side=left] del").first).to_have_text("20")
    expect(tab.locator("[data-side=right] ins").first).to_have_text("2")
    left, right = (
        tab.locator(f"[data-side={side}]").first.bounding_box() for side in ("left", "right")
    )
    assert left
    assert right
    assert left["x"] + left["width"] <= right["x"]
    assert left["y"] == right["y"]


def test_answer_is_edited_without_sending(open_tab: OpenTab, page: PageServer) -> None:
    """An edited answer is saved in the history without sending a request, at the head only."""
    name = page.create_conversation("Hello")
    tab = open_tab(page, f"/conversations/{name}")
    answer = tab.locator(".said.assistant")
    answer.hover()
    answer.get_by_role("button", name="Edit").click()
    expect(tab.get_by_role("button", name="Send as a new branch")).to_have_count(0)
    tab.get_by_role("dialog").get_by_label("Your message").fill("Good morning")
    tab.get_by_role("button", name="Save without sending").click()
    expect(tab.locator(".said.assistant .prose").first).to_have_text("Good morning")
    expect(tab.locator(".said.assistant .chip.edited")).to_be_visible()
    tab.locator(".rows a").first.click()
    expect(tab.get_by_text("Your message starts a new branch")).to_be_visible()
    answer.hover()
    answer.get_by_role("button", name="Edit").click()
    expect(tab.get_by_role("button", name="Save without sending")).to_be_disabled()


def test_stale_tab_asks_before_moving_the_head(open_tab: OpenTab, page: PageServer) -> None:
    """A stale tab offers a new branch, and retains what was typed."""
    name = page.create_conversation("Hello")
    tab = open_tab(page, f"/conversations/{name}")
    tab.get_by_label("Your message").fill("From the first tab")
    page.post(f"/api/conversations/{name}/runs", message="From elsewhere")
    head = page.get(f"/api/conversations/{name}")["head"]
    expect(tab.get_by_text("was continued in another tab")).to_be_visible()
    tab.get_by_role("button", name="Continue from here on a new branch").click()
    expect(tab.get_by_text("Your message starts a new branch")).to_be_visible()
    expect(tab.get_by_label("Your message")).to_have_value("From the first tab")
    assert page.get(f"/api/conversations/{name}")["head"] == head
    tab.get_by_label("Your message").press("Enter")
    expect(tab.locator(".said.user .prose")).to_have_text(["Hello", "From the first tab"])
    wait_until(lambda: page.get(f"/api/conversations/{name}")["head"] != head)  # it is answered
