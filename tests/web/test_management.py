"""Lists, statuses, deletion with undo, and search results, through the API and the pages."""

import asyncio
import json
import re
from pathlib import Path

from for_each import for_each
from kedge.store import ConversationRow
from kedge.store.summaries import ConversationSummary
from kedge.web.service import ConversationService, build_tag_url
from kedge.web.shapes import overview_status
from kedge.web.transcript import find_matches
from web.conftest import TIMEOUT, PageServer, serve_page
from web.test_runs import start_run


async def close_deletions(service: ConversationService) -> None:
    """Run the scheduled deletions now, as a server does at shutdown."""
    await service.deletions.aclose()


def test_scheduled_deletion_hides_the_conversation(empty_page: PageServer) -> None:
    """It is not listed, found or continued, and to schedule it twice changes nothing."""
    name = empty_page.create_conversation("A private matter")
    other = empty_page.create_conversation("Something else")
    for _ in range(2):
        assert empty_page.client.delete(f"/api/conversations/{name}?undo=3600").status_code == 204
    assert [row["id"] for row in empty_page.get("/api/conversations")["data"]] == [other]
    assert empty_page.get("/api/conversations", q="private")["total"] == 0
    assert empty_page.get("/api/search", q="private")["data"] == []
    rejected = empty_page.client.post(f"/api/conversations/{name}/runs", json={"message": "Lost"})
    assert rejected.status_code == 404
    assert "is about to be deleted" in rejected.json()["error"]["message"]


def test_deletion_can_be_undone_for_a_time(empty_page: PageServer) -> None:
    """The conversation is there again; after the time for undo its data is deleted."""
    name = empty_page.create_conversation("A private matter")
    path = f"/api/conversations/{name}"
    empty_page.client.delete(f"{path}?undo=3600")
    assert empty_page.post(f"{path}/restore")["id"] == name
    assert empty_page.get("/api/conversations", q="private")["total"] == 1
    empty_page.client.delete(f"{path}?undo=3600")
    empty_page.run(close_deletions)
    assert empty_page.client.get(path).status_code == 404
    assert empty_page.client.post(f"{path}/restore").status_code == 404


def test_time_for_undo_is_limited(page: PageServer) -> None:
    """A deletion can be undone for an hour at most."""
    name = page.create_conversation("Something else")
    assert page.client.delete(f"/api/conversations/{name}?undo=7200").status_code == 422


def test_killed_server_completes_deletions_at_start(tmp_path: Path) -> None:
    """At start, due deletions are run; later ones stay hidden and can be restored."""
    with serve_page(tmp_path) as page:
        due, later, listed = (page.create_conversation(text) for text in ("One", "Two", "Three"))

        async def leave_scheduled(service: ConversationService) -> None:
            await service.store.schedule_delete(due, service.store.clock())
            await service.store.schedule_delete(later, service.store.clock() + 3600)

        page.run(leave_scheduled)
    with serve_page(tmp_path) as page:

        async def wait_for_deletion(service: ConversationService) -> None:
            async with asyncio.timeout(TIMEOUT):
                while len(await service.store.list_scheduled()) > 1:
                    pass

        page.run(wait_for_deletion)
        assert page.client.get(f"/api/conversations/{due}").status_code == 404
        assert [row["id"] for row in page.get("/api/conversations")["data"]] == [listed]
        page.post(f"/api/conversations/{later}/restore")
    with serve_page(tmp_path) as page:
        rows = page.get("/api/conversations")["data"]
        assert {row["id"] for row in rows} == {later, listed}


def test_status_of_conversation(gated: PageServer) -> None:
    """Running, stopped and failed questions at the head are shown in the list."""
    name = gated.create_conversation("Hello")

    def status() -> str:
        (row,) = gated.get("/api/conversations")["data"]
        return row["status"]

    assert status() == "active"
    run = start_run(gated, name, "wait for me")
    assert status() == "running"
    assert 'class="chip running"' in gated.client.get(f"/conversations/{name}").text
    gated.post(f"/api/conversations/{name}/runs/{run}/stop")
    assert status() == "cancelled"
    assert ">cancelled</span>" in gated.client.get("/").text
    gated.faults.set("status=400", times=1)
    gated.client.post(f"/api/conversations/{name}/runs", json={"message": "Go on"})
    assert status() == "failed"
    assert 'class="chip failed"' in gated.client.get(f"/conversations/{name}").text
    gated.post(f"/api/conversations/{name}/runs", message="And now?")
    assert status() == "active"


@for_each(
    ("until", "expected"), [(None, "active"), (300_000.0, "active"), (50_000.0, "expiring"), (9.0, "expired")]
)  # fmt: skip
def test_conversation_is_expiring_within_a_day(until: float | None, expected: str) -> None:
    """The status is expiring within a day of the expiry time, active before that, and expired after it."""
    summary = ConversationSummary(ConversationRow("c"), relied_until=until)
    assert overview_status(summary, now=10.0) == expected


def test_tags_link_to_workflow_or_conversations() -> None:
    """A workflow's tag links to the workflow; any other tag links to the filtered list."""
    assert build_tag_url("workflow:wf_1") == "/workflows/wf_1"
    assert build_tag_url("workflow:refine") == "/?tag=workflow%3Arefine"
    assert build_tag_url("a b") == "/?tag=a+b"


@for_each(
    ("text", "query", "words"),
    [
        ("The Café and the cafe", "cafe", ["Café", "cafe"]),
        ("anchors and anchorage", "anchor*", ["anchors", "anchorage"]),
        ("anchors away", "anchor -away", []),
        ("left or right", "left OR right", ["left", "right"]),
        ("a long phrase here", '"long phrase"', ["long", "phrase"]),
        ("東京都に行く", "東京", ["東京都に行く"]),
        ("not this", "NOT this", []),
    ],
)
def test_matching_words_are_found_in_excerpts(text: str, query: str, words: list[str]) -> None:
    """Case and accents are ignored, prefixes match, and excluded words are not marked."""
    assert [text[start:end] for start, end in find_matches(text, query)] == words


def test_search_finds_messages_of_forks(empty_page: PageServer) -> None:
    """A fork has the messages, not the responses, of the conversation that it continues; matches have positions."""
    name = empty_page.create_conversation("Tell me about lighthouses", "And harbours")
    first = empty_page.get(f"/api/conversations/{name}/tree")["nodes"][0]["node"]
    fork = empty_page.post(f"/api/conversations/{name}/fork", at=first)["id"]
    hits = empty_page.get("/api/search", q="lighthouses", role="user")["data"]
    assert {hit["conversation"] for hit in hits} == {name, fork}
    start, end = hits[0]["matches"][0]
    assert hits[0]["excerpt"][start:end] == "lighthouses"
    assert empty_page.get(f"/api/conversations/{fork}")["responses"] == 0
    assert "2 responses in the tree" in empty_page.client.get(f"/conversations/{fork}").text
    assert f"/conversations/{fork}?" in empty_page.client.get("/?q=lighthouses").text


def test_search_results_link_to_messages(empty_page: PageServer) -> None:
    """Results on the path and on side branches link to their messages, and the text is escaped."""
    name = empty_page.create_conversation("Tell me about <b>lighthouses</b>", "And harbours")
    first = empty_page.get(f"/api/conversations/{name}/tree")["nodes"][0]["node"]
    empty_page.post(f"/api/conversations/{name}/runs", message="And ferries", at=first)
    html = empty_page.client.get("/?q=lighthouses").text
    assert "&lt;b&gt;<mark>lighthouses</mark>&lt;/b&gt;" in html
    for word in ("harbours", "ferries"):
        links = re.findall(r'href="([^"]+block=[^"]+)"', empty_page.client.get(f"/?q={word}").text)
        url, _, block = links[0].replace("&amp;", "&").partition("#")
        page = empty_page.client.get(url).text
        assert f'id="{block}"' in page
        assert "This message has no answer yet." not in page


def test_invalid_searches_are_rejected(page: PageServer) -> None:
    """A search needs a text, and a role must be one that exists."""
    unknown = page.client.get("/api/search", params={"q": "lighthouses", "role": "humna"})
    assert unknown.status_code == 422
    assert json.loads(page.client.get("/api/search").text)["error"]["code"] == "invalid"
