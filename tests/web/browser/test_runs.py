"""Answers and workflows in Chromium: stopped, reloaded, followed from another tab, and resumed."""

from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from ports import reserve_port
from server.gated_model import GatedModel
from server.waiting import wait_until
from web.browser.chromium import WatchedTab, open_context
from web.browser.conftest import OpenTab, send
from web.conftest import PageServer, serve_page


def start_answer(tab: Page) -> None:
    """Send a message and wait for the beginning of its answer, which the gate holds back."""
    send(tab, "wait for me")
    expect(tab.locator(".said.fresh .prose")).to_contain_text("answer")


def test_stopped_answer_is_stored_and_can_be_retried(
    gated: PageServer, gate: GatedModel, open_tab: OpenTab
) -> None:
    """A partial answer is stored and shown after a reload, and Retry gets the complete answer."""
    tab = open_tab(gated, f"/conversations/{gated.create_conversation('Hello')}")
    start_answer(tab)
    tab.get_by_role("button", name="Stop").click()
    expect(tab.get_by_text("The beginning of the answer is stored")).to_be_visible()
    expect(tab.get_by_text("This answer was stopped.")).to_be_visible()
    expect(tab.locator(".said.assistant .prose").last).to_have_text("answer")
    expect(tab.locator(".rows .chip.cancelled")).to_be_visible()
    tab.goto(tab.url.partition("?")[0])
    expect(tab.get_by_text("This answer was stopped.")).to_be_visible()
    gate.open_gate()
    tab.get_by_role("button", name="Retry").click()
    expect(tab.locator(".said.assistant .prose").last).to_have_text("answer to wait for me")
    expect(tab.get_by_text("This answer was stopped.")).to_have_count(0)
    expect(tab.locator(".rows [aria-current]")).to_contain_text("head")


def test_long_answer_is_shown_as_one_text(
    tmp_path: Path, gate: GatedModel, open_tab: OpenTab
) -> None:
    """The deltas of an answer become one text, because a layout of thousands of texts stops the page."""
    gate.words = 200
    with serve_page(tmp_path, model=gate) as page:
        tab = open_tab(page, f"/conversations/{page.create_conversation()}")
        start_answer(tab)
        prose = tab.locator(".said.fresh .prose")
        expect(prose).to_have_text("answer" + " word" * 200)
        assert prose.evaluate("each => each.childNodes.length") == 1
        tab.close()
        gate.open_gate()


def test_answer_continues_anywhere(gated: PageServer, gate: GatedModel, open_tab: OpenTab) -> None:
    """After a reload the page attaches to the run again, and a second tab shows it as well."""
    tab = open_tab(gated, f"/conversations/{gated.create_conversation()}")
    start_answer(tab)
    tab.reload()
    expect(tab.locator(".said.fresh .prose")).to_contain_text("answer")
    expect(tab.locator(".said.user .prose")).to_have_text("wait for me")
    other = open_tab(gated, tab.url.removeprefix(gated.url))
    expect(other.locator(".said.fresh .prose")).to_contain_text("answer")
    other.get_by_role("button", name="Stop").click()
    for each in (tab, other):
        expect(each.get_by_text("This answer was stopped.")).to_be_visible()
    wait_until(lambda: gate.cancelled == ["wait for me"])  # the server notices it a moment later


def test_question_survives_a_server_restart(
    browser: Browser, tmp_path: Path, gate: GatedModel
) -> None:
    """A banner is shown while the server is down; afterwards the message is shown with Retry.

    A message that could not be sent meanwhile remains in the composer.
    """
    with open_context(browser) as context, reserve_port() as port:
        with serve_page(tmp_path, port=port, model=gate) as page:
            watched_tab = WatchedTab(context, page.url)
            tab = watched_tab.open(f"/conversations/{page.create_conversation('Hello')}")
            start_answer(tab)
        expect(tab.get_by_text("The server cannot be reached. Messages")).to_be_visible()
        send(tab, "not sent yet")
        expect(tab.get_by_role("alert")).to_contain_text("The server cannot be reached.")
        expect(tab.locator(".said.assistant").last).to_be_hidden()
        expect(tab.get_by_label("Your message")).to_have_value("not sent yet")
        with serve_page(tmp_path, port=port, model=GatedModel()):
            expect(tab.get_by_text("The server cannot be reached. Messages")).to_be_hidden()
            expect(tab.locator(".said.user .prose").last).to_have_text("wait for me")
            expect(tab.get_by_role("button", name="Retry")).to_be_visible()
            expect(tab.get_by_label("Your message")).to_have_value("not sent yet")
            tab.get_by_role("button", name="Edit").last.click()
            tab.get_by_role("dialog").get_by_label("Your message").fill("go on")
            tab.get_by_role("button", name="Send as a new branch").click()
            expect(tab.locator(".said.assistant .prose").last).to_have_text("answer to go on")


def test_another_response_is_selected_while_an_answer_is_written(
    gated: PageServer, gate: GatedModel, open_tab: OpenTab
) -> None:
    """The selected response remains shown, with the draft and its focus, until the user goes back."""
    tab = open_tab(gated, f"/conversations/{gated.create_conversation('Hello', 'Again')}")
    start_answer(tab)
    tab.locator(".rows a", has_text="Hello").click()
    expect(tab.get_by_text("An answer is being written elsewhere")).to_be_visible()
    expect(tab.get_by_role("button", name="Send", exact=True)).to_be_visible()
    composer = tab.get_by_label("Your message")
    composer.fill("a draft")
    element = composer.element_handle()
    for _ in range(2):
        with tab.expect_response("**/runs"):
            pass
    assert element.evaluate("each => each.isConnected && each === document.activeElement")
    tab.go_back()
    expect(tab.locator(".said.fresh .prose")).to_contain_text("answer")
    expect(composer).to_have_value("a draft")
    gate.open_gate()
    expect(tab.locator(".said.assistant .prose").last).to_have_text("answer to wait for me")
    expect(tab.locator("[data-exchange]")).to_have_count(3)  # the run has ended
    expect(composer).to_have_value("a draft")


def test_workflow_is_started_and_followed(
    gated: PageServer, gate: GatedModel, open_tab: OpenTab
) -> None:
    """The page shows each answer when it is stored, without a reload."""
    tab = open_tab(gated, "/workflows")
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
