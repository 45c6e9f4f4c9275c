"""What a user does every day, in Chromium: type, copy, regenerate, change between conversations, read figures."""

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from kedge.conversation import Conversation
from kedge.turns import assistant, user
from kedge.web.service import ConversationService
from web.browser.chromium import WatchedTab, open_context
from web.browser.conftest import OpenTab
from web.conftest import PageServer, add, serve_page

TYPED = "tell me a joke about cats? / just kidding"
CODE = "def area(radius):\n    return 3.14 * radius ** 2  # approximate\n"
ANSWER = f"Use **this**:\n\n```python\n{CODE}```\n"
PHONE = {"viewport": {"width": 390, "height": 800}, "is_mobile": True, "has_touch": True}


@pytest.fixture
def settings() -> dict[str, Any]:
    """Return the settings of a context that may read the clipboard."""
    return {"permissions": ["clipboard-read", "clipboard-write"]}


def write_blocks(page: PageServer, *blocks: Any) -> str:
    """Create a conversation with these blocks and return its id."""

    async def work(service: ConversationService) -> str:
        conversation = await Conversation.create(
            service.models.engine, store=service.store, title="Code"
        )
        await conversation.append(*blocks)
        return conversation.id

    return page.run(work)


def read_theme(tab: Page) -> str:
    """Return the color of the page's ground."""
    return tab.evaluate("getComputedStyle(document.documentElement).backgroundColor")


def read_color(element: Locator, name: str = "color") -> str:
    """Return a computed color of an element."""
    return element.evaluate(f"each => getComputedStyle(each)['{name}']")


def resolve_color(tab: Page, name: str) -> str:
    """Return the computed form of a color of the style sheet."""
    script = """name => { const each = document.createElement("i"); each.style.color = `var(${name})`;
      document.body.append(each); const color = getComputedStyle(each).color; each.remove(); return color; }"""
    return tab.evaluate(script, name)


def test_new_conversation_takes_what_is_typed(page: PageServer, open_tab: OpenTab) -> None:
    """The composer of a new conversation has the focus, so that a message can be typed at once."""
    tab = open_tab(page, "/")
    tab.get_by_role("button", name="New conversation").first.click()
    expect(tab.get_by_label("Your message")).to_be_focused()
    tab.keyboard.type(TYPED)
    expect(tab.get_by_label("Your message")).to_have_value(TYPED)


@pytest.mark.parametrize("selector", ["", ".rows a", ".said.user .prose"])
def test_shortcuts_take_no_text(page: PageServer, open_tab: OpenTab, selector: str) -> None:
    """Text typed in an existing conversation is a message, whatever was clicked before."""
    tab = open_tab(page, f"/conversations/{page.create_conversation('First', 'Second')}")
    before = read_theme(tab)
    if selector:
        tab.locator(selector).first.click()
        expect(tab.locator("[data-exchange]")).to_have_count(1 if "rows" in selector else 2)
    tab.keyboard.type(TYPED)
    expect(tab.get_by_label("Your message")).to_have_value(TYPED)
    assert read_theme(tab) == before
    expect(tab.get_by_role("dialog")).to_have_count(0)


def test_shortcuts_apply_in_the_list_of_responses(page: PageServer, open_tab: OpenTab) -> None:
    """Escape leaves the composer for the list of responses, where keys are shortcuts; c goes back."""
    tab = open_tab(page, f"/conversations/{page.create_conversation('First', 'Second')}")
    tab.get_by_label("Your message").fill("A draft")
    tab.keyboard.press("Escape")
    tab.keyboard.press("k")
    expect(tab.locator("[data-exchange]")).to_have_count(1)
    expect(tab.locator(".rows [aria-current]")).to_be_focused()
    before = read_theme(tab)
    tab.keyboard.press("t")
    assert read_theme(tab) != before
    tab.keyboard.press("c")
    tab.keyboard.type("!")
    expect(tab.get_by_label("Your message")).to_have_value("A draft!")


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
    tab = open_tab(page, f"/conversations/{write_blocks(page, user('How?'), assistant(ANSWER))}")
    answer = tab.locator(".said.assistant")
    answer.hover()
    answer.get_by_role("button", name="Copy", exact=True).click()
    expect(tab.get_by_text("Copied", exact=True)).to_be_visible()
    assert tab.evaluate("navigator.clipboard.readText()") == ANSWER
    answer.get_by_role("button", name="Copy code").click()
    tab.wait_for_function(
        "text => navigator.clipboard.readText().then(each => each === text)", arg=CODE
    )


def test_code_is_highlighted(page: PageServer, open_tab: OpenTab) -> None:
    """Keywords, strings and comments have colors of their own in both themes."""
    tab = open_tab(page, f"/conversations/{write_blocks(page, user('How?'), assistant(ANSWER))}")
    code = tab.locator(".prose pre code")
    expect(code).to_have_text(CODE.strip(), use_inner_text=True)
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme)  # pyright: ignore[reportArgumentType]
        colors = {
            read_color(each)
            for each in (code, code.get_by_text("def", exact=True), code.get_by_text("# approx"))
        }
        assert len(colors) == 3


def test_recent_conversations_are_listed(empty_page: PageServer, open_tab: OpenTab) -> None:
    """A conversation lists the recent ones, marks itself, and links to the others."""
    other = empty_page.create_conversation("About lighthouses")
    name = empty_page.create_conversation("About harbours", title="Harbours")
    tab = open_tab(empty_page, f"/conversations/{name}")
    recent = tab.get_by_role("navigation", name="Recent conversations")
    expect(recent.locator("[aria-current]")).to_have_text("Harbours")
    recent.get_by_role("link", name="About lighthouses").click()
    tab.wait_for_url(f"**/conversations/{other}")
    expect(recent.locator("[aria-current]")).to_have_text("About lighthouses")
    recent.get_by_role("button", name="New conversation").click()
    expect(tab.get_by_label("Your message")).to_be_focused()


def test_requests_are_listed_with_their_message(browser: Browser, tmp_path: Path) -> None:
    """With stored bodies the list of requests begins each row with the message."""
    with serve_page(tmp_path, keep_bodies=True) as page, open_context(browser) as context:
        parts = [{"role": "user", "content": [{"type": "input_text", "text": "In parts"}]}]
        for body in ({"input": "As text"}, {"input": parts}):
            assert page.client.post("/v1/responses", json={"model": "practice", **body}).is_success
        chat = {"model": "practice", "messages": [{"role": "user", "content": "By chat"}]}
        assert page.client.post("/v1/chat/completions", json=chat).is_success
        tab = WatchedTab(context, page.url).open("/requests")
        expect(tab.locator("[data-row] .name")).to_have_text(["By chat", "In parts", "As text"])


async def call_tools(service: ConversationService) -> str:
    """Create a conversation in which one tool fails and another one succeeds."""

    def print_page() -> str:
        """Print a page."""
        raise RuntimeError("there is no paper")

    tools = [print_page, add]
    async with Conversation(
        service.models.engine, store=service.store, tools=tools
    ) as conversation:
        await conversation.send("Please call print_page")
        await conversation.send("Please call add with a=1 and b=2")
        return conversation.id


def test_failed_tool_results_look_failed(page: PageServer, open_tab: OpenTab) -> None:
    """A result of a tool that failed is marked in words and in the color of errors."""
    name = page.run(call_tools)
    tab = open_tab(page, f"/conversations/{name}")
    results = tab.locator("details.tool", has_text="Result of")
    expect(results).to_have_count(2)
    expect(results.first.locator(".chip.failed")).to_have_text("failed")
    expect(results.last.locator(".chip")).to_have_count(0)
    assert read_color(results.first, "borderTopColor") == resolve_color(tab, "--bad")


def test_compare_options_say_what_differs(page: PageServer, open_tab: OpenTab) -> None:
    """Branches with the same question have different options: position, time, first words."""
    name = page.create_conversation("Shared", "Same question")
    nodes = page.get(f"/api/conversations/{name}/chain")["nodes"]
    page.post(f"/api/conversations/{name}/turns", text="Same question", at=nodes[0]["node"])
    tab = open_tab(page, f"/conversations/{name}")
    options = tab.locator("[name=left] option").all_text_contents()
    assert len(set(options)) == 2
    assert all(
        re.search(r"^Response [23]( \(head\))?, .*\d\d:\d\d:\d\d.*: Same question", each)
        for each in options
    )


def test_dashboard_explains_figures(empty_page: PageServer, open_tab: OpenTab) -> None:
    """Conversations have names, single points are visible, and each figure has a tooltip."""
    tab = open_tab(empty_page, "/")
    tab.get_by_role("button", name="New conversation").first.click()
    expect(tab.get_by_label("Your message")).to_be_focused()
    tab.keyboard.type("What is 6*7?")
    tab.keyboard.press("Enter")
    expect(tab.locator(".said.assistant .prose")).to_have_text("6*7 = 42.")
    tab.goto(empty_page.url + "/dashboard")
    expect(tab.locator(".breakdown").get_by_role("link", name="What is 6*7?")).to_be_visible()
    point = tab.locator(".plot .point").first
    assert float(point.evaluate("each => parseFloat(getComputedStyle(each).strokeWidth)")) >= 6
    expect(point.locator("title")).to_have_text(re.compile(r"^\d\d:\d\d: median .*ms|s$"))
    for selector in (".tile", ".chart figcaption", ".breakdown th", ".ranking dt"):
        titles = tab.locator(selector).evaluate_all("all => all.map(each => each.title)")
        assert titles
        assert all(titles), selector
    hints = tab.locator(".tile").evaluate_all(
        "all => all.filter(each => each.title === each.querySelector('.hint')?.textContent).length"
    )
    assert hints == 0


def test_each_thing_has_one_word(page: PageServer, open_tab: OpenTab) -> None:
    """The list counts responses, says when conversations changed, and when the provider's copy expires."""
    page.create_conversation("Hello")
    tab = open_tab(page, "/")
    headings = tab.locator("th").all_text_contents()
    assert "Responses" in headings
    assert "Changed" in headings
    assert "Provider's copy expires" in headings
    assert not {"Turns", "Active", "Expires"} & set(headings)
    tab.locator("summary", has_text="Sort").click()
    expect(tab.get_by_role("link", name="Most responses")).to_be_visible()


def test_amber_is_for_problems_only(page: PageServer, open_tab: OpenTab) -> None:
    """Nothing of a conversation with branches, edits and stopped answers is amber, unless something failed."""
    name = page.create_conversation("First", "Second")
    nodes = page.get(f"/api/conversations/{name}/chain")["nodes"]
    page.post(f"/api/conversations/{name}/turns", text="Other", at=nodes[0]["node"])
    tab = open_tab(page, f"/conversations/{name}?at={nodes[0]['node']}")
    expect(tab.get_by_text("Your message starts a new branch")).to_be_visible()
    amber = {resolve_color(tab, "--warn"), resolve_color(tab, "--warn-ground")}
    script = """(amber) => [...document.querySelectorAll("main *")].filter((each) => {
      const style = getComputedStyle(each);
      return each.checkVisibility() && amber.some(
        (color) => [style.color, style.backgroundColor, style.stroke].includes(color)); }).map(
      (each) => each.outerHTML.slice(0, 120))"""
    tab.locator(".legend-box").evaluate("each => { each.open = true }")
    assert tab.evaluate(script, list(amber)) == []
    tab.goto(page.url + "/?q=first")
    assert tab.evaluate(script, list(amber)) == []


@pytest.mark.parametrize("settings", [{}, PHONE], ids=["desktop", "phone"])
def test_toast_does_not_cover_the_composer(page: PageServer, open_tab: OpenTab) -> None:
    """A notification leaves the composer visible."""
    tab = open_tab(page, f"/conversations/{page.create_conversation('Hello')}")
    files = [{"name": "setup.exe", "mimeType": "application/x-msdownload", "buffer": b"MZ"}]
    tab.locator("[data-attach]").set_input_files(files)  # pyright: ignore[reportArgumentType]
    toast, composer = tab.locator("#toast"), tab.locator("[data-composer]")
    expect(toast).to_contain_text("cannot be attached")
    shown, below = toast.bounding_box(), composer.bounding_box()
    assert shown
    assert below
    assert shown["y"] + shown["height"] <= below["y"]


@pytest.mark.parametrize("settings", [PHONE])
def test_actions_have_one_line_each_on_phones(page: PageServer, open_tab: OpenTab) -> None:
    """The labels of the actions of an answer are not broken into letters."""
    tab = open_tab(page, f"/conversations/{page.create_conversation('Hello')}")
    heights = tab.locator(".acts-row > *").evaluate_all("all => all.map(each => each.clientHeight)")
    assert len(heights) == 5
    assert max(heights) <= 40


@pytest.mark.parametrize("settings", [PHONE])
def test_disclosures_have_marks_on_phones(page: PageServer, open_tab: OpenTab) -> None:
    """Each summary that can be opened on a phone shows a mark at the end of its line."""
    name = page.create_conversation("Please call add with a=2 and b=3")
    tab = open_tab(page, f"/conversations/{name}")
    script = """all => all.filter((each) => each.checkVisibility() && !each.querySelector(".icon, .sr")).filter(
      (each) => { const mark = getComputedStyle(each, "::after"), own = getComputedStyle(each);
      const isNative = own.display === "list-item" && own.listStyleType !== "none";
      return !isNative && (mark.content === "none" || mark.display === "none"); }).map(
      (each) => each.textContent.trim())"""
    for path in (f"/conversations/{name}", "/", "/workflows"):
        tab.goto(page.url + path)
        tab.wait_for_load_state()
        assert tab.locator("summary").evaluate_all(script) == []


def test_tags_with_a_comma_are_kept(empty_page: PageServer, browser: Browser) -> None:
    """A tag with a comma is one tag: it is quoted in the dialog, and can be added in quotes."""
    name = empty_page.create_conversation("Hello")
    empty_page.client.patch(f"/api/conversations/{name}", json={"tags": ["Paris, France", 'a "b"']})
    with open_context(browser) as context:
        tab = WatchedTab(context, empty_page.url).open(f"/conversations/{name}")
        tab.wait_for_load_state()
        tab.locator("summary", has_text="Manage").click()
        tab.get_by_role("button", name="Change tags").click()
        field = tab.get_by_role("dialog").get_by_label("Tags, separated by commas")
        expect(field).to_have_value('"Paris, France", "a ""b"""')
        field.fill(f'{field.input_value()}, plain, "Rome, Italy"')
        tab.get_by_role("button", name="Save").click()
        expect(tab.locator(".talk-head a.chip")).to_have_text(
            ["Paris, France", "Rome, Italy", 'a "b"', "plain"]
        )
