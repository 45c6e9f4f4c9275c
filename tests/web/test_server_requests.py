"""Requests of other programs to the server beside the page: list, plan, chain, content."""

from pathlib import Path
from typing import Any

from kedge.store import ProxiedRequest
from kedge.web.server_requests import find_chain
from web.conftest import PageServer, serve_page
from web.test_pages import page_text


def ask(page: PageServer, path: str = "/v1/responses", **body: Any) -> dict[str, Any]:
    """Send a request as another program does."""
    answer = page.client.post(path, json={"model": "practice", **body})
    assert answer.is_success, answer.text
    return {} if body.get("stream") else answer.json()


def test_requests_of_other_programs_are_listed_with_their_chain(fresh: PageServer) -> None:
    """Chained ones show what the server had; those of the page itself are in their conversation."""
    fresh.create_conversation("Sent by the page")
    assert fresh.get("/api/requests")["data"] == []
    first = ask(fresh, input="My name is Ada.")
    second = ask(fresh, input="What is it?", previous_response_id=first["id"], stream=False)
    ask(fresh, input=[{"role": "user", "content": "And?"}], previous_response_id=second["id"])
    fresh.client.post("/v1/responses", json={"model": "practice", "input": 5})
    ask(fresh, "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}])
    listed = fresh.get("/api/requests")
    chat, rejected, *chained = listed["data"]
    assert (listed["requests"], listed["chained"]) == (5, 2)
    assert [row["plan"] for row in chained] == ["chained", "chained", "full"]
    assert [(row["sent_items"], row["full_items"]) for row in chained] == [(1, 5), (1, 3), (1, 1)]
    assert all(row["sent_bytes"] < row["full_bytes"] for row in chained[:2])
    assert rejected["status"] == 400
    assert chat["upstream"].endswith("/v1/chat/completions")
    shown = fresh.get(f"/api/requests/{chained[1]['id']}")
    assert (shown["before"], shown["after"]) == ([chained[2]["id"]], [chained[0]["id"]])
    assert (shown["request"], shown["response"]) == (None, None)
    html = page_text(fresh.client.get(f"/requests/{chained[1]['id']}").text)
    assert f"Sent 1 of 3 items on {first['id']}" in html
    assert f"Request {chained[0]['id']} continues it" in html
    assert "--keep-bodies" in html
    full = page_text(fresh.client.get(f"/requests/{chained[2]['id']}").text)
    assert "the program sent it to this server without an earlier response" in full
    assert "5 requests: 2 chained" in page_text(fresh.client.get("/requests").text)


def test_content_is_stored_with_keep_bodies_only(tmp_path: Path) -> None:
    """Streams and conversation objects, too."""
    with serve_page(tmp_path, keep_bodies=True) as page:
        made = page.client.post("/v1/conversations", json={}).json()["id"]
        ask(page, input="One", conversation=made)
        ask(page, input="Two", conversation={"id": made}, stream=True)
        second, first = page.get("/api/requests")["data"]
        assert {first["previous_response_id"], second["previous_response_id"]} == {made}
        stored = page.get(f"/api/requests/{second['id']}")
        assert '"Two"' in stored["request"]
        assert "response.completed" in stored["response"]


def test_rejected_clients_leave_no_trace(tmp_path: Path) -> None:
    """Without the token a request has no user, so that no one could see it."""
    with serve_page(tmp_path, token="secret") as page:
        body = {"model": "practice", "input": "Hello"}
        assert page.client.post("/v1/responses", json=body).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert page.client.post("/v1/responses", json=body, headers=headers).is_success
        (row,) = page.client.get("/api/requests", headers=headers).json()["data"]
        assert row["status"] == 200
        assert page.client.get("/api/requests").status_code == 401


def test_what_waits_is_written_when_the_server_stops(tmp_path: Path) -> None:
    """Requests are written together, at the latest at the end."""
    with serve_page(tmp_path) as page:
        ask(page, input="Hello")
    with serve_page(tmp_path) as page:
        assert page.get("/api/requests")["requests"] == 1


def make_row(number: int, response: str, previous: str = "") -> ProxiedRequest:
    """A recorded request."""
    return ProxiedRequest(1.0, "u", "m", 200, 0.1, previous, response, 1, 1, 1, 1, id=number)


def test_a_chain_ends_where_it_begins() -> None:
    """Ids come from other programs: a circle of them is no endless chain."""
    rows = [make_row(1, "a", "c"), make_row(2, "b", "a"), make_row(3, "c", "b"), make_row(4, "")]
    before, after = find_chain(rows, rows[2])
    assert ([row.id for row in before], [row.id for row in after]) == ([1, 2], [1])
    assert find_chain(rows, rows[3]) == ([], [])
