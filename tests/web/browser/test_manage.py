"""Managing and searching conversations in Chromium."""

from playwright.sync_api import Browser, Page, Request, expect

from kedge.planning.anchors import MODES
from web.browser.chromium import WatchedTab, open_context
from web.browser.conftest import OpenTab, send
from web.conftest import PageServer


def manage(tab: Page, action: str, label: str = "", text: str = "") -> None:
    """Choose an action of the menu of a conversation, and fill in the field of its dialog."""
    tab.wait_for_load_state()
    tab.locator("summary", has_text="Manage").click()
    tab.get_by_role("button", name=action, exact=True).click()
    if label:
        tab.get_by_role("dialog").get_by_label(label).fill(text)
        tab.get_by_role("button", name="Save").click()


def test_conversation_is_renamed_and_tagged(page: PageServer, open_tab: OpenTab) -> None:
    """Each change is shown, also a quoted tag with a comma, and retains the draft."""
    tab = open_tab(page, f"/conversations/{page.create_conversation('Tell me about lighthouses')}")
    tab.get_by_label("Your message").fill("A draft")
    manage(tab, "Rename", "Title", "Lighthouses")
    expect(tab.get_by_role("heading", name="Lighthouses", exact=True)).to_be_visible()
    manage(tab, "Change tags", "Tags", 'towers, "Paris, France"')
    expect(tab.locator(".talk-head a.chip")).to_have_text(["Paris, France", "towers"])
    expect(tab.get_by_label("Your message")).to_have_value("A draft")


def test_unchanged_tags_are_not_saved(page: PageServer, open_tab: OpenTab) -> None:
    """The dialog offers the tags as they are entered, and sends nothing if they are not changed."""
    name = page.create_conversation("Hello", tags=["towers", "Paris, France"])
    tab = open_tab(page, f"/conversations/{name}")
    changes: list[Request] = []
    tab.on("request", lambda sent: changes.append(sent) if sent.method == "PATCH" else None)
    tab.locator("summary", has_text="Manage").click()
    tab.get_by_role("button", name="Change tags").click()
    expect(tab.get_by_label("Tags, separated by commas")).to_have_value('"Paris, France", towers')
    tab.get_by_role("button", name="Save").click()
    expect(tab.get_by_role("dialog")).to_have_count(0)
    manage(tab, "Archive")
    expect(tab.locator(".talk-head .chip.archived")).to_be_visible()
    assert len(changes) == 1


def test_deletion_is_undone(empty_page: PageServer, open_tab: OpenTab) -> None:
    """The list counts down the time for undo, and undoing restores the conversation as it was."""
    name = empty_page.create_conversation("Hello", title="Lighthouses", tags=["towers"])
    empty_page.client.patch(f"/api/conversations/{name}", json={"archived": True})
    tab = open_tab(empty_page, f"/conversations/{name}")
    manage(tab, "Delete")
    expect(tab.get_by_text("The conversation is deleted for good in")).to_be_visible()
    tab.wait_for_load_state()
    assert empty_page.get("/api/conversations", show="all")["total"] == 0
    tab.get_by_role("button", name="Undo").click()
    expect(tab.get_by_text("deleted for good")).to_be_hidden()
    (row,) = empty_page.get("/api/conversations", show="archived")["data"]
    assert (row["title"], row["tags"]) == ("Lighthouses", ["towers"])


def test_mode_is_changed(empty_page: PageServer, open_tab: OpenTab) -> None:
    """The menu shows the mode, offers all modes and the default, and the next message is sent in the new one."""
    name = empty_page.create_conversation("My name is Ada.")
    tab = open_tab(empty_page, f"/conversations/{name}")
    for exchanges, before, mode in ((2, "default", "stateless"), (3, "stateless", "")):
        tab.locator("summary", has_text="Manage").click()
        expect(tab.get_by_role("button", name="Change mode")).to_contain_text(before)
        tab.get_by_role("button", name="Change mode").click()
        field = tab.get_by_role("dialog").get_by_label("Mode")
        expect(field).to_have_value("" if before == "default" else before)
        values = field.locator("option").evaluate_all("all => all.map((each) => each.value)")
        assert values == ["", *MODES]
        field.select_option(mode)
        tab.get_by_role("button", name="Save").click()
        expect(tab.get_by_role("dialog")).to_have_count(0)
        expect(tab.locator(f'[data-manage][data-mode="{mode}"]')).to_have_count(1)
        assert empty_page.get(f"/api/conversations/{name}")["mode"] == (mode or None)
        send(tab, "What is my name?")
        expect(tab.locator("[data-exchange]")).to_have_count(exchanges)  # the answer is stored
    nodes = empty_page.get(f"/api/conversations/{name}/tree")["nodes"]
    modes = [node["response"]["mode"] for node in nodes]
    assert modes == ["chained", "stateless", "chained"]


def test_deletion_in_another_tab_is_shown(browser: Browser, empty_page: PageServer) -> None:
    """A conversation that is about to be deleted is not continued, until that is undone."""
    name = empty_page.create_conversation("Hello")
    with open_context(browser) as context:
        tab = WatchedTab(context, empty_page.url).open(f"/conversations/{name}")
        empty_page.client.delete(f"/api/conversations/{name}?undo=3600")
        expect(tab.get_by_text("This conversation was deleted.")).to_be_visible()
        send(tab, "Not lost")
        expect(tab.get_by_role("alert")).to_contain_text("is about to be deleted")
        expect(tab.get_by_label("Your message")).to_have_value("Not lost")
        empty_page.post(f"/api/conversations/{name}/restore")
        expect(tab.get_by_text("This conversation was deleted.")).to_be_hidden()
        expect(tab.get_by_label("Your message")).to_have_value("Not lost")


def test_several_are_changed_at_once(empty_page: PageServer, open_tab: OpenTab) -> None:
    """Conversations selected in the list are tagged, filtered, deleted, restored and archived."""
    for title in ("One", "Two", "Three"):
        empty_page.create_conversation("Hello", title=title)
    tab = open_tab(empty_page, "/")
    tab.get_by_label("Select One").check()
    tab.get_by_label("Select Two").check()
    expect(tab.get_by_text("2 selected")).to_be_visible()
    tab.get_by_role("button", name="Tag", exact=True).click()
    tab.get_by_role("dialog").get_by_label("Tags to add").fill("both")
    tab.get_by_role("button", name="Save").click()
    expect(tab.locator("td").get_by_role("link", name="both")).to_have_count(2)
    tab.wait_for_load_state()
    tab.get_by_label("Tag", exact=True).select_option("both")
    expect(tab.locator("[data-row]")).to_have_count(2)
    tab.wait_for_load_state()
    for count, name in enumerate(("Select One", "Select Two"), 1):
        tab.get_by_label(name).check()
        tab.get_by_role("button", name="Delete", exact=True).click()
        expect(tab.locator("[data-row]")).to_have_count(2 - count)
        tab.wait_for_load_state()
    expect(tab.get_by_text("2 conversations are deleted for good in")).to_be_visible()
    tab.get_by_role("button", name="Undo").click()
    expect(tab.locator("[data-row]")).to_have_count(2)
    tab.wait_for_load_state()
    tab.get_by_label("Select all").check()
    tab.get_by_role("button", name="Archive", exact=True).click()
    expect(tab.get_by_role("heading", name="No matches")).to_be_visible()
    assert [row["title"] for row in empty_page.get("/api/conversations")["data"]] == ["Three"]


def test_one_deleted_elsewhere_is_skipped(browser: Browser, empty_page: PageServer) -> None:
    """An action on several conversations skips one that was deleted elsewhere, reports it, and shows the others."""
    for title in ("One", "Two"):
        name = empty_page.create_conversation("Hello", title=title)
    with open_context(browser) as context:
        tab = WatchedTab(context, empty_page.url).open("/")
        tab.get_by_label("Select all").check()
        empty_page.client.delete(f"/api/conversations/{name}")
        tab.get_by_role("button", name="Delete", exact=True).click()
        expect(tab.get_by_text("there is no conversation")).to_be_visible()
        expect(tab.get_by_text("The conversation is deleted for good in")).to_be_visible()
        expect(tab.locator("[data-row]")).to_have_count(0)


def test_search_result_links_to_its_message(empty_page: PageServer, open_tab: OpenTab) -> None:
    """A search result highlights the match, and its link scrolls to the message and expands it."""
    name = empty_page.create_conversation(*(f"Message {number} of many" for number in range(12)))
    empty_page.create_conversation("Please call add with a=4711 and b=1")
    tab = open_tab(empty_page, "/?q=message+3")
    expect(tab.locator("mark", has_text="3").first).to_be_visible()
    tab.locator(".excerpts a", has_text="user").first.click()
    expect(tab.locator(".said.user", has_text="Message 3 of many")).to_be_in_viewport()
    expect(tab.locator(".talk-head h1")).to_be_in_viewport()  # the page itself did not scroll
    assert name in tab.url
    tab.goto(empty_page.url + "/?q=4712")
    tab.locator(".excerpts a", has_text="tool result").click()
    expect(tab.locator("details.tool pre", has_text="4712")).to_be_in_viewport()
