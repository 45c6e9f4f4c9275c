"""The page in Chromium: list, chat, forks, comparison, keyboard, themes and hostile content."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from kedge.turns import assistant, image, opaque, reasoning, system, tool_call, tool_result, user
from web.browser.chromium import WatchedTab
from web.browser.conftest import OpenTab, send
from web.conftest import PageServer, serve_page


def test_list_is_searched_and_opened_by_keyboard(page: PageServer, open_tab: OpenTab) -> None:
    """The list can be searched, navigated with j and k, and a conversation opened with Enter."""
    page.create_conversation("Tell me about lighthouses", title="Lighthouses")
    page.create_conversation("Tell me about harbours", title="Harbours")
    tab = open_tab(page, "/")
    expect(tab.get_by_role("heading", name="Conversations", exact=True)).to_be_visible()
    expect(tab.get_by_role("link", name="Lighthouses")).to_be_visible()
    tab.keyboard.press("/")
    tab.keyboard.type("lighthouses")
    tab.keyboard.press("Enter")
    tab.wait_for_url("**q=lighthouses**")
    expect(tab.get_by_role("link", name="Harbours")).to_have_count(0)
    tab.keyboard.press("j")
    tab.keyboard.press("Enter")
    expect(tab.locator(".said.user .prose")).to_have_text("Tell me about lighthouses")


def test_answer_streams_into_new_conversation(page: PageServer, open_tab: OpenTab) -> None:
    """A new conversation shows the streamed answer and the plan of each request."""
    tab = open_tab(page, "/")
    tab.get_by_role("button", name="New conversation").first.click()
    expect(tab.get_by_role("heading", name="Send a message")).to_be_visible()
    tab.wait_for_load_state()  # the scripts are loaded
    send(tab, "What is 6*7?")
    expect(tab.locator(".said.assistant .prose")).to_have_text("6*7 = 42.")
    expect(tab.locator(".plan")).to_have_count(1)
    send(tab, "What did I say first?")
    expect(tab.locator(".said.assistant .prose").last).to_have_text(
        'You said first: "What is 6*7?"'
    )
    expect(tab.locator(".plan")).to_have_count(2)  # the page was updated after the stream
    tab.locator(".plan > summary").last.click()
    card = tab.locator(".plan").last
    expect(card.locator(".plan-words")).to_have_text(
        "Sent 1 new message; the server already had the other 2."
    )
    expect(card.locator(".plan-detail")).to_contain_text("Chained on resp_")
    expect(card.locator(".block.sent")).to_have_count(2)  # one block, and one in the key
    expect(tab.locator(".rows [aria-current]")).to_have_text("What did I say first?head")


def test_forking_creates_a_branch(page: PageServer, open_tab: OpenTab) -> None:
    """A fork at a response adds a branch and retains the others; a draft is kept on the way back."""
    name = page.create_conversation("First", "Second", "Third")
    tab = open_tab(page, f"/conversations/{name}")
    first = tab.locator("[data-exchange]").first
    first.hover()
    first.get_by_role("button", name="Branch from here").click()
    expect(tab.get_by_text("Your message starts a new branch")).to_be_visible()
    expect(tab.locator("[data-exchange]")).to_have_count(1)
    tab.wait_for_load_state()
    send(tab, "What did I say last?")
    expect(tab.get_by_text('You said last: "First"')).to_be_visible()
    expect(tab.locator(".rows li")).to_have_count(4)
    tab.locator(".rows a", has_text="Third").click()
    tab.get_by_label("Your message").fill("A draft")
    tab.get_by_role("link", name="Back to the current position").click()
    expect(tab.locator(".said.user .prose").last).to_have_text("What did I say last?")
    expect(tab.get_by_label("Your message")).to_have_value("A draft")


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


def test_graph_is_navigated_by_keyboard(page: PageServer, open_tab: OpenTab) -> None:
    """Keys select a response, the chat shows its path, and the address is a permalink."""
    name = page.create_conversation("First", "Second", "Third")
    tab = open_tab(page, f"/conversations/{name}")
    expect(tab.locator("[data-exchange]")).to_have_count(3)
    tab.get_by_label("Your message").press("Escape")
    tab.keyboard.press("k")
    expect(tab.locator("[data-exchange]")).to_have_count(2)
    tab.keyboard.press("k")
    expect(tab.locator("[data-exchange]")).to_have_count(1)
    assert "?at=" in tab.url
    tab.reload()
    expect(tab.locator("[data-exchange]")).to_have_count(1)


def test_menus_and_help_are_used_by_keyboard(page: PageServer, open_tab: OpenTab) -> None:
    """A link skips the navigation, Escape closes a menu and leaves the composer, and a key opens the help."""
    tab = open_tab(page, f"/conversations/{page.create_conversation('First')}")
    tab.get_by_label("Your message").fill("A draft")
    tab.get_by_role("link", name="Skip to content").press("Enter")
    expect(tab.locator("main")).to_be_focused()
    tab.locator("summary", has_text="Manage").click()
    tab.get_by_role("button", name="Rename").press("Escape")
    expect(tab.get_by_role("button", name="Rename")).to_be_hidden()
    expect(tab.get_by_label("Your message")).to_have_value("A draft")
    tab.get_by_label("Your message").press("Escape")
    tab.keyboard.press("?")
    expect(tab.get_by_role("dialog", name="Keyboard")).to_be_visible()


def test_the_last_selected_response_is_shown(page: PageServer, open_tab: OpenTab) -> None:
    """A state that was selected earlier and arrives later does not replace the selected one."""
    name = page.create_conversation("One", "Two", "Three")
    first = page.get(f"/api/conversations/{name}/tree")["nodes"][0]["node"]
    tab = open_tab(page, f"/conversations/{name}")
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    tab.route(f"**/conversations/{name}?at={first}", hold)
    tab.locator(".rows a", has_text="One").click()
    tab.locator(".rows a", has_text="Two").click()
    expect(tab.locator(".rows [aria-current]")).to_contain_text("Two")
    with tab.expect_response(f"**/conversations/{name}?at={first}"):
        held[0].continue_()
    tab.locator(".rows a", has_text="Three").click()
    expect(tab.locator(".rows [aria-current]")).to_contain_text("Three")
    tab.go_back()
    expect(tab.locator(".rows [aria-current]")).to_contain_text("Two")


SET_HIDDEN = """(value) => {
  Object.defineProperty(document, "hidden", { value, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_dashboard_updates_while_requests_run(page: PageServer, open_tab: OpenTab) -> None:
    """The dashboard is updated by server-sent events, without a reload, while its tab is visible."""
    page.create_conversation("Before")
    tab = open_tab(page, "/dashboard?range=1h")
    expect(tab.get_by_text("live", exact=True)).to_be_visible()
    requests = tab.locator(".tile dd").first
    before = int((requests.text_content() or "0").replace(",", ""))
    page.create_conversation("During", "And again")
    expect(requests).to_have_text(f"{before + 2:,}")
    tab.evaluate(SET_HIDDEN, True)
    expect(tab.get_by_text("paused", exact=True)).to_be_visible()
    page.create_conversation("Later")
    tab.evaluate(SET_HIDDEN, False)
    expect(requests).to_have_text(f"{before + 3:,}")
    expect(tab.get_by_text("live", exact=True)).to_be_visible()
    expect(tab.locator("figure.chart")).to_have_count(10)


@pytest.mark.parametrize("settings", [{"color_scheme": "dark"}])
def test_dark_theme_is_remembered(page: PageServer, open_tab: OpenTab) -> None:
    """The theme follows the system until the user selects one, which is restored after a reload."""
    tab = open_tab(page, "/")
    switch = tab.get_by_role("button", name="Switch between light and dark")
    assert read_theme(tab) == "rgb(16, 18, 20)"
    switch.click()
    assert read_theme(tab) == "rgb(250, 250, 249)"
    tab.reload()
    assert read_theme(tab) == "rgb(250, 250, 249)"
    switch.click()
    assert read_theme(tab) == "rgb(16, 18, 20)"


NARROW = {"viewport": {"width": 360, "height": 720}, "is_mobile": True, "has_touch": True}


MENUS = {
    "Request settings": "[data-settings]",
    "Compare": ".compare-form",
    "Manage": "[data-manage]",
}


@pytest.mark.parametrize("settings", [NARROW])
def test_pages_fit_a_narrow_screen(page: PageServer, open_tab: OpenTab) -> None:
    """No page scrolls horizontally on a narrow screen, menus are visible, and a message can be sent there."""
    called = tool_call("n" * 64, "{}", call_id="call_1"), tool_result("call_1", "done")
    messages = "What is 2+3?", "Please call add with a=2 and b=3", "x" * 300
    name = page.create_conversation(*messages, blocks=[user("Hello"), *called], tags=["t" * 300])
    nodes = page.get(f"/api/conversations/{name}/tree")["nodes"]
    page.post(f"/api/conversations/{name}/runs", message="Other", at=nodes[0]["node"])
    compare = f"left={nodes[1]['node']}&right={nodes[-1]['node']}"
    paths = ("/", "/dashboard", "/workflows", "/requests", f"/conversations/{name}")
    for path in (*paths, f"/conversations/{name}/compare?{compare}"):
        wide = open_tab(page, path).evaluate("document.documentElement.scrollWidth")
        assert wide <= 360, path
    tab = open_tab(page, f"/conversations/{name}")
    pages = tab.get_by_role("navigation", name="Pages")
    assert pages.evaluate("each => each.scrollWidth <= each.clientWidth")
    for width in (360, 900):
        tab.set_viewport_size({"width": width, "height": 720})
        for title, menu in MENUS.items():
            tab.locator("summary", has_text=title).click()
            box = tab.locator(menu).bounding_box()
            assert box
            assert 0 <= box["x"] <= box["x"] + box["width"] <= width, (title, width)
            tab.locator("summary", has_text=title).press("Escape")
    tab.set_viewport_size({"width": 360, "height": 720})
    tab.get_by_label("Your message").fill("What is 4*4?")
    tab.get_by_role("button", name="Send").tap()
    expect(tab.get_by_text("4*4 = 16.")).to_be_visible()


HOSTILE = """<script>alert('script')</script><img src=x onerror="alert('image')">
<svg onload="alert('svg')"><style>* { display: none }</style><iframe src="https://evil.example/"></iframe>
[link](javascript:alert('link')) ![spy](https://evil.example/spy.png) [ok](https://good.example/)
<a href="javascript:alert(1)" onclick="alert('click')">click me</a> {{ 7 * 7 }}
</template></pre></details>
<form action="https://evil.example/"><button>send</button></form><base href="https://evil.example/">
<meta http-equiv="refresh" content="0;url=https://evil.example/"><object data="https://evil.example/"></object>
"""


def create_hostile(page: PageServer) -> tuple[str, str]:
    """Create a conversation that can be continued, and one that a strict server would reject."""
    called = tool_call("add", HOSTILE, call_id="call_1"), tool_result("call_1", HOSTILE)
    texts = [system(HOSTILE), user(HOSTILE), reasoning(summary=[HOSTILE]), *called]
    blocks = [*texts, assistant(HOSTILE)]
    name = page.create_conversation(HOSTILE, title=HOSTILE, tags=[HOSTILE[:400]], blocks=blocks)
    named = tool_call(HOSTILE, HOSTILE, call_id=HOSTILE)
    odd = opaque({"type": HOSTILE, HOSTILE: HOSTILE})
    worse = [user([HOSTILE, image("javascript:alert(1)")]), named, odd]
    return name, page.create_conversation(title=HOSTILE, blocks=worse)


def test_hostile_content_is_inert(page: PageServer, open_tab: OpenTab) -> None:
    """HTML and scripts in every text field neither run nor load anything."""
    names = create_hostile(page)
    tab = open_tab(page, "/")
    for name in reversed(names):
        tab.goto(page.url + f"/conversations/{name}")
        tab.locator("details").evaluate_all("all => all.forEach(each => { each.open = true })")
        expect(tab.get_by_text("<script>alert('script')</script>").first).to_be_visible()
        assert tab.locator("main :is(script, iframe, style, object, base, meta, img)").count() == 0
        assert tab.locator("main form:not([data-composer], .compare-form)").count() == 0
        assert tab.locator("main :is([onclick], [onerror], [onload], [style])").count() == 0
        links = tab.locator(".prose a").evaluate_all("all => all.map(each => each.href)")
        assert set(links) == {"https://evil.example/spy.png", "https://good.example/"}
    expect(tab.locator(".plan .facts").first).to_be_visible()
    send(tab, HOSTILE)
    expect(tab.locator("[data-exchange]")).to_have_count(2)
    tab.goto(page.url + "/?q=script")
    expect(tab.locator("[data-row]").first).to_be_visible()
    for name in names:
        page.client.delete(f"/api/conversations/{name}")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """Yield a page that needs a token."""
    with serve_page(tmp_path_factory.mktemp("guarded"), token="open-sesame") as server:
        yield server


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """Yield a separate context, with its own cookies."""
    opened = browser.new_context()
    yield opened
    opened.close()


def log_in(watched: WatchedTab, path: str = "/") -> Page:
    """Open a path of a page that needs a token, enter the token, and return the tab with the list."""
    tab = watched.open(path)
    tab.get_by_label("Token").fill("open-sesame")
    tab.get_by_role("button", name="Log in").click()
    expect(tab.get_by_role("heading", name="Conversations", exact=True)).to_be_visible()
    return tab


def test_login_form_accepts_token(guarded: PageServer, context: BrowserContext) -> None:
    """The token is entered once and stored in a cookie that scripts cannot read."""
    watched = WatchedTab(context, guarded.url)
    tab = log_in(watched, "/dashboard")
    assert tab.evaluate("document.cookie") == ""
    tab.get_by_role("link", name="Dashboard").click()
    expect(tab.get_by_text("live", exact=True)).to_be_visible()
    assert watched.problems == []


def test_lost_session_is_reported_on_the_dashboard(
    guarded: PageServer, context: BrowserContext
) -> None:
    """The figures are not updated any more, and the page says so."""
    tab = log_in(WatchedTab(context, guarded.url))
    tab.get_by_role("link", name="Dashboard").click()
    expect(tab.get_by_text("live", exact=True)).to_be_visible()
    context.clear_cookies()
    expect(tab.get_by_text("Your session has ended.")).to_be_visible()
    expect(tab.get_by_text("live", exact=True)).to_be_hidden()


def test_message_of_a_lost_session_is_not_lost(
    guarded: PageServer, context: BrowserContext
) -> None:
    """A message that could not be sent remains in the composer."""
    tab = log_in(WatchedTab(context, guarded.url))
    tab.get_by_role("button", name="New conversation").first.click()
    expect(tab.get_by_role("heading", name="Send a message")).to_be_visible()
    context.clear_cookies()
    expect(tab.get_by_text("Your session has ended.")).to_be_visible()
    send(tab, "Hello")
    expect(tab.get_by_role("alert")).to_contain_text("Your session has ended.")
    expect(tab.get_by_label("Your message")).to_have_value("Hello")


@pytest.mark.parametrize("path", ["/", "/dashboard", "/requests", "/workflows", "conversation"])
def test_a_tab_notices_that_another_one_has_logged_out(
    guarded: PageServer, context: BrowserContext, path: str
) -> None:
    """Each page says that the session has ended, without a reload and without a message being sent."""
    tab = log_in(WatchedTab(context, guarded.url))
    if path == "conversation":
        path = f"/conversations/{guarded.create_conversation('Hello')}"
    tab.goto(guarded.url + path)
    other = context.new_page()
    other.goto(guarded.url)
    other.get_by_role("button", name="Log out").click()
    expect(other.get_by_label("Token")).to_be_visible()
    tab.bring_to_front()
    expect(tab.get_by_text("Your session has ended.")).to_be_visible()
    if path.startswith("/conversations/"):
        tab.get_by_label("Your message").fill("A draft")
        tab.locator(".rows a[data-node]").first.click()
        expect(tab.locator("#toast")).to_contain_text("Your session has ended.")
        expect(tab.get_by_label("Your message")).to_have_value("A draft")


TYPED = "tell me a joke about cats? / just kidding"
CODE = "def area(radius):\n    return 3.14 * radius ** 2  # approximate\n"
ANSWER = f"Use **this**:\n\n```python\n{CODE}```\n"


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


@pytest.mark.parametrize("settings", [{"permissions": ["clipboard-read", "clipboard-write"]}])
def test_code_is_highlighted_and_copied(page: PageServer, open_tab: OpenTab) -> None:
    """An answer is copied as Markdown, a code block, which has colors, without its fences."""
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
    code = tab.locator(".prose pre code")
    shown = (code, code.get_by_text("def", exact=True), code.get_by_text("# approx"))
    assert len({each.evaluate("each => getComputedStyle(each).color") for each in shown}) == 3


@pytest.mark.parametrize("settings", [NARROW])
def test_toast_covers_neither_banner_nor_composer(page: PageServer, open_tab: OpenTab) -> None:
    """A notification leaves a banner and the composer of a phone visible."""
    tab = open_tab(page, f"/conversations/{page.create_conversation('Hello')}")
    banner = tab.locator("#lost")
    banner.evaluate("each => { each.hidden = false; each.textContent = 'Lost' }")
    tab.evaluate("scrollTo(0, 0)")
    files = [{"name": "setup.exe", "mimeType": "application/x-msdownload", "buffer": b"MZ"}]
    tab.locator("[data-attach]").set_input_files(files)  # pyright: ignore[reportArgumentType]
    toast, composer = tab.locator("#toast"), tab.locator("[data-composer]")
    expect(toast).to_contain_text("cannot be attached")
    above, shown, below = (each.bounding_box() for each in (banner, toast, composer))
    assert above
    assert shown
    assert below
    assert above["y"] + above["height"] <= shown["y"]
    assert shown["y"] + shown["height"] <= below["y"]
