"""Tests of the HTML pages: complete and readable without scripts, and safe."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest

from kedge.store import ProxiedRequest
from kedge.turns import image, user
from kedge.web.service import ConversationService
from kedge.workflows import Verdict, refine
from web.conftest import PageServer, serve_page
from web.test_api import parse_events

PIXEL = b"\x89PNG\r\n\x1a\n"


def page_text(html: str) -> str:
    """Return the visible text of a page."""
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def tree_nodes(html: str) -> list[str]:
    """Return the nodes that have a row in the graph."""
    return re.findall(r'<a href="\?at=\d+" data-node="(\d+)"', html)


def test_list_is_paged_at_ten_thousand_rows(tmp_path: Path) -> None:
    """The list has 50 rows per page, links to the next page, and a last page without one."""

    async def fill(service: ConversationService) -> None:
        def work(tx: object) -> None:
            rows = [(f"c{n}", f"Talk {n:05}", 1, 1, 1.0 + n, 1.0 + n) for n in range(2, 10_002)]
            tx.run_many(  # pyright: ignore[reportAttributeAccessIssue]
                "INSERT INTO conversations (id, title, archived, tree, head, created_at, updated_at) "
                "VALUES (?, ?, 0, ?, ?, ?, ?)",
                rows,
            )

        await service.store.create("First")
        await service.store.database.write(work)

    with serve_page(tmp_path) as page:
        page.run(fill)
        first = page.client.get("/").text
        assert "of 10k" in first
        (after,) = re.findall(r'href="(/\?offset=\d+)" rel="next"', first)
        second = page.client.get(after.replace("&amp;", "&")).text
        assert "51\N{EN DASH}100" in second.replace("&ndash;", "\N{EN DASH}")
        last = page.client.get("/?offset=10000").text
        assert 'rel="next"' not in last
        assert page.client.get("/?offset=20000", follow_redirects=False).status_code == 303
        assert "Talk 00777" in page.client.get("/?q=talk+00777").text


def test_a_conversation_with_a_slash_in_its_id_can_be_opened(page: PageServer) -> None:
    """An encoded slash is a part of the id, also in the links of the page."""
    for name in ("team/2026/plan", "a%2Fb", "a/compare"):
        page.run(lambda service, name=name: service.store.create(id=name))
        path = f"/conversations/{quote(name, safe='')}"
        shown = page.client.get(path)
        assert shown.status_code == 200
        assert f'href="/api{path}/export"' in shown.text
        assert page.client.get(f"/api{path}").json()["id"] == name
        body = {"message": "Hello", "stream": True}
        last = parse_events(page.client.post(f"/api{path}/runs", json=body).text)[-1]
        assert last["url"].startswith(f"{path}?at=")
        assert page.client.get(last["url"]).status_code == 200


def test_conversation_is_readable_without_scripts(page: PageServer) -> None:
    """The HTML has the graph, the chat and a link to every response."""
    name = page.create_conversation("What is **2+3**?", "Please call add with a=2 and b=3")
    html = page.client.get(f"/conversations/{name}").text
    assert "<strong>2+3</strong>" in html
    assert len(tree_nodes(html)) == 3
    assert 'aria-current="true"' in html
    assert "Called" in html


def test_plans_are_readable_without_scripts(page: PageServer) -> None:
    """Each plan is a page, which compares the size of a chained request with that of the conversation."""
    name = page.create_conversation("What is **2+3**?", "Please call add with a=2 and b=3")
    html = page.client.get(f"/conversations/{name}").text
    plans = re.findall(rf'href="(/conversations/{name}/plans/\d+)"', html)
    assert len(plans) == 3
    first, _, last = (page_text(page.client.get(plan).text) for plan in plans)
    assert "Request size" in first
    assert "instead of" not in first
    assert re.search(r"Request size \d+ B instead of ", last)
    assert "Chained on resp_" in last
    assert "already on the server" in last


def test_unknown_pages_are_not_found(page: PageServer) -> None:
    """An unknown path and an unknown conversation give a page with the status 404."""
    assert "Not found" in page.client.get("/nowhere").text
    assert page.client.get("/conversations/none").status_code == 404


def test_stored_images_are_shown_and_remote_ones_linked(page: PageServer) -> None:
    """Stored images are shown; remote images are linked and not loaded."""
    parts = ["Look", image(PIXEL), image("https://evil.example/pixel.png")]
    drawing = image("data:image/svg+xml;base64,PHN2Zy8+")
    name = page.create_conversation(blocks=[user(parts), user([drawing])])
    html = page.client.get(f"/conversations/{name}").text
    assert html.count("<img") == 1
    assert re.search(r'src="/conversations/[^"]+/attachments/blk_[0-9a-f]+/[0-9]"', html)
    assert 'href="https://evil.example/pixel.png"' in html


def test_branches_are_compared_after_common_messages(page: PageServer) -> None:
    """Common messages are collapsed, and the messages that differ are marked."""
    name = page.create_conversation("Shared", "Left")
    nodes = page.get(f"/api/conversations/{name}/tree")["nodes"]
    reply = page.post(f"/api/conversations/{name}/runs", message="Right", at=nodes[0]["node"])
    query = f"left={nodes[1]['node']}&right={reply['node']}"
    html = page.client.get(f"/conversations/{name}/compare?{query}").text
    assert "<summary>2 messages in common</summary>" in html
    assert "<del>Left</del>" in html
    assert "<ins>Right</ins>" in html
    assert page.client.get(f"/conversations/{name}/compare?left=999999").status_code == 404


def test_long_path_is_truncated_and_can_be_expanded(page: PageServer) -> None:
    """A long path shows the newest exchanges and a link to the older ones."""
    name = page.create_conversation(*(f"Number {n}" for n in range(45)))
    html = page.client.get(f"/conversations/{name}").text
    assert "Show 5 older exchanges" in html
    assert html.count("data-exchange=") == 40
    full_page = page.client.get(f"/conversations/{name}?all=1").text
    assert full_page.count("data-exchange=") == 45
    assert "43 responses" in full_page  # collapsed in the graph
    first = re.search(r"unfold=(\d+)", full_page)
    assert first
    unfolded = page.client.get(f"/conversations/{name}?unfold={first[1]}").text
    assert len(tree_nodes(unfolded)) == 45


def test_dashboard_of_an_empty_page(empty_page: PageServer) -> None:
    """A figure that no request has is described by words; updates are sent as server-sent events."""
    assert "No requests in this range" in empty_page.client.get("/dashboard").text
    name = empty_page.create_conversation("Before")
    text = page_text(empty_page.client.get("/dashboard?range=nonsense").text)
    assert "First token \N{EN DASH} no complete streamed answer" in text
    assert "within" not in text
    body = {"message": "Second", "stream": True}
    assert empty_page.client.post(f"/api/conversations/{name}/runs", json=body).is_success
    assert "median; 95 % within" in page_text(empty_page.client.get("/dashboard").text)
    page_html = empty_page.client.get("/dashboard?range=1h").text
    (revision,) = re.findall(r'data-seen="([^"]+)"', page_html)
    empty_page.create_conversation("Meanwhile")  # such an update is not lost
    with empty_page.client.stream("GET", f"/dashboard/live?range=1h&seen={revision}") as live:
        lines = live.iter_lines()
        assert next(lines) == "retry: 1000"
        event = next(line for line in lines if line.startswith("event:"))
        assert event == "event: figures"
        html = json.loads(next(lines).removeprefix("data: "))
        assert html.count("<figure") == 10


@dataclass
class HealedConversation:
    """A conversation whose second request was refused and sent again: the server had lost the first response."""

    page: PageServer
    name: str
    nodes: list[dict[str, Any]]
    """The nodes of the lost response, of the refused request and of the request that was sent again."""

    def read_card(self, index: int) -> str:
        """Return the HTML of the plan card of a node."""
        return self.page.client.get(
            f"/conversations/{self.name}/plans/{self.nodes[index]['node']}"
        ).text


@pytest.fixture(scope="module")
def healed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HealedConversation]:
    """Yield the only conversation of a page that stores bodies."""
    with serve_page(tmp_path_factory.mktemp("healed"), keep_bodies=True) as page:
        name = page.create_conversation("First")
        page.faults.set("forget_all", times=1)
        body = {"message": "Second", "stream": True}
        assert page.client.post(f"/api/conversations/{name}/runs", json=body).is_success
        nodes = page.get(f"/api/conversations/{name}/tree")["nodes"]
        yield HealedConversation(page, name, nodes)


def test_healing_is_marked_in_the_tree(healed: HealedConversation) -> None:
    """The lost response, the refused request and the complete one have their marks and statuses."""
    assert [node["marks"] for node in healed.nodes] == [["lost"], ["resent"], ["full", "head"]]
    refused = healed.nodes[1]["response"]
    assert (refused["status"], refused["is_resent"]) == ("refused", True)
    assert refused["error_code"] == "previous_response_not_found"


def test_healing_is_shown_on_plan_cards(healed: HealedConversation) -> None:
    """The cards say that a response is lost, why a request was refused, and why it was sent again."""
    lost = page_text(healed.read_card(0))
    assert "cannot use it: the server no longer has this response" in lost
    refused = page_text(healed.read_card(1))
    assert "Refused by the server: a request of 1 block" in refused
    assert "not found" in refused
    resent = page_text(healed.read_card(2))
    assert "The server no longer had the earlier response" in resent


def test_plan_cards_have_stored_bodies(healed: HealedConversation) -> None:
    """The card of each request has its body, and the body or the events of its response."""
    refused = healed.read_card(1)
    assert "previous_response_id" in refused
    assert "status 400" in refused
    resent = healed.read_card(2)
    assert "&#34;model&#34;: &#34;practice&#34;" in resent
    assert "event: response.completed" in resent


def test_refused_request_offers_no_retry(healed: HealedConversation) -> None:
    """A request that was sent again needs nothing of the user."""
    html = healed.page.client.get(f"/conversations/{healed.name}?at={healed.nodes[1]['node']}").text
    assert "This request was sent again." in html
    assert 'data-do="retry"' not in html


def test_healing_is_no_failure(healed: HealedConversation) -> None:
    """The list, the statistics and the dashboard count a refused request that was sent again as such."""
    (overview,) = healed.page.get("/api/conversations")["data"]
    assert (overview["status"], overview["failed"]) == ("active", 0)
    requests = healed.page.get("/api/analytics")["requests"]
    assert (requests["failed"], requests["refused"], requests["resent"]) == (0, 1, 1)
    dashboard = healed.page.client.get("/dashboard").text
    assert "healed: gone" in dashboard
    assert "1 refused" in dashboard


async def _run_refine(service: ConversationService) -> str:
    answers = iter([Verdict(passed=False, critique="<b>Shorter</b>, please"), Verdict(passed=True)])
    place: Any = {"store": service.store, "engine": service.models.engine}
    result = await refine("Name a boat", judge=lambda _: next(answers), **place)
    return result.workflow


def test_workflows_are_shown_as_rounds(page: PageServer) -> None:
    """A workflow page shows the verdict of each round and the result."""
    name = page.run(_run_refine)
    assert name in page.client.get("/workflows").text
    html = page.client.get(f"/workflows/{name}").text
    assert html.count('<section class="round"') == 2
    assert "&lt;b&gt;Shorter&lt;/b&gt;, please" in html
    assert "The last answer passed." in html
    assert page.client.get("/workflows/none").status_code == 404


@contextmanager
def logged_in(folder: Path) -> Iterator[tuple[PageServer, httpx2.Response]]:
    """Yield a page with a token whose client has logged in, and the response to the login."""
    with serve_page(folder, token="a-token") as page:
        form = {"token": "a-token"}
        yield page, page.client.post("/login", data=form, follow_redirects=False)


def test_login_form_asks_for_the_token(tmp_path: Path) -> None:
    """A browser without a session is redirected to the form, which rejects a wrong token."""
    with serve_page(tmp_path, token="a-token") as page:
        redirected = page.client.get("/", follow_redirects=False)
        assert redirected.headers["location"] == "/login"
        wrong = page.client.post("/login", data={"token": "no"}, follow_redirects=False)
        assert (wrong.status_code, "Wrong token" in wrong.text) == (403, True)


def test_login_form_sets_session_cookie(tmp_path: Path) -> None:
    """The token gives a session cookie that is valid for the page and its API, but not for the server."""
    with logged_in(tmp_path) as (page, entered):
        assert entered.status_code == 303
        cookie = entered.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert "a-token" not in cookie
        assert page.client.get("/").status_code == 200
        created = page.post("/api/conversations", title="x")
        assert page.post(f"/api/conversations/{created['id']}/runs", message="What is 2+3?")["text"]
        assert page.client.get("/v1/models").status_code == 401


def test_logout_ends_the_session(tmp_path: Path) -> None:
    """Only the page itself can log out; then copies of the cookie are invalid as well."""
    with logged_in(tmp_path) as (page, entered):
        client = page.client
        copied = {"cookie": entered.headers["set-cookie"].partition(";")[0]}
        foreign = client.post("/logout", headers={"origin": "https://evil.example"})
        assert foreign.status_code == 403
        assert 'action="/logout"' in client.get("/").text
        left = client.post("/logout", follow_redirects=False)
        assert (left.status_code, left.headers["location"]) == (303, "/login")
        for headers in ({}, copied):
            assert client.get("/api/conversations", headers=headers).status_code == 401
        assert client.post("/logout", follow_redirects=False).status_code == 303


def test_log_has_no_content(page: PageServer, caplog: pytest.LogCaptureFixture) -> None:
    """The log has path, status and request id, but no search terms; health checks and polling are at DEBUG."""
    with caplog.at_level("DEBUG", "kedge.access"):
        for path in ("/healthz", "/static/page.css", "/static/none.css"):
            page.client.get(path)
        answer = page.client.get("/?q=a+private+matter")
        page.client.get("/dashboard")  # the other requests are in the log after this one
    assert answer.headers["x-request-id"] in caplog.text
    assert "GET / 200" in caplog.text
    assert "private" not in caplog.text
    levels = {each.getMessage().split()[1]: each.levelname for each in caplog.records}
    assert levels["/healthz"] == levels["/static/page.css"] == "DEBUG"
    assert levels["/static/none.css"] == levels["/"] == "INFO"


def test_static_files_are_cached_by_content(page: PageServer) -> None:
    """Versioned files are immutable, others are revalidated, and unknown files are not served."""
    html = page.client.get("/").text
    (style,) = re.findall(r'href="(/static/page\.css\?v=\w+)"', html)
    retained = page.client.get(style)
    assert "immutable" in retained.headers["cache-control"]
    cached = page.client.get(
        "/static/page.css", headers={"if-none-match": retained.headers["etag"]}
    )
    assert cached.status_code == 304
    assert page.client.get("/static/chat.js").headers["cache-control"] == "no-cache"
    assert page.client.get("/static/..%2fapp.py").status_code == 404
    assert page.client.get("/static/nothing.js").status_code == 404


def test_proxied_requests_are_listed_with_their_plans(tmp_path: Path) -> None:
    """Savings, healings and reasons are listed, and bodies only where they were stored."""
    common: Any = {"upstream": "http://u/v1", "model": "m", "status": 200, "seconds": 0.5}
    sizes: Any = {"full_blocks": 9, "sent_bytes": 100, "full_bytes": 4_000}
    full: Any = {**common, **sizes, "anchor": "", "sent_blocks": 9}
    rows = [
        ProxiedRequest(1.0, **common, anchor="r1", response_id="r2", sent_blocks=1, **sizes),
        ProxiedRequest(2.0, **full, response_id="r3", healed="rejected", request=b"<b>Hello</b>"),
        ProxiedRequest(3.0, **full, response_id="", reason="no_anchor"),
    ]

    async def fill(service: ConversationService) -> None:
        service.store.keep_bodies = True
        await service.store.add_proxied(rows)

    with serve_page(tmp_path) as page:
        assert "No requests yet" in page.client.get("/requests").text
        page.run(fill)
        text = page_text(page.client.get("/requests").text)
        assert "3 requests: 1 chained, 0 refused, 1 healed" in text
        assert "no_anchor" in text
        assert "on r1" in page_text(page.client.get("/requests/1").text)
        healed = page.client.get("/requests/2").text
        assert "&lt;b&gt;Hello&lt;/b&gt;" in healed
        reason = page_text(page.client.get("/requests/3").text)
        assert "no stored response is known to remember a prefix" in reason
        assert "--keep-bodies" in reason
        assert page.client.get("/requests/99").status_code == 404
        assert [row["id"] for row in page.get("/api/requests", before=2)["data"]] == [1]
        assert page.client.get(f"/api/requests/{2**80}").status_code == 404
