"""Requests of other programs to the server beside the page: list, plan, chain and content."""

import re
from pathlib import Path
from typing import Any

import pytest

from for_each import for_each
from kedge.store import ProxiedRequest
from kedge.web.server_requests import find_chain
from web.conftest import PageServer, serve_page
from web.test_pages import page_text


def ask(page: PageServer, path: str = "/v1/responses", **body: Any) -> dict[str, Any]:
    """Send a request as another program would and return the JSON response."""
    answer = page.client.post(path, json={"model": "practice", **body})
    assert answer.is_success, answer.text
    return {} if body.get("stream") else answer.json()


@pytest.fixture(scope="module")
def rows(page: PageServer) -> list[dict[str, Any]]:
    """Return the rows of a chain of three requests, a rejected one and a chat completion, the newest first."""
    first = ask(page, input="My name is Ada.")
    second = ask(page, input="What is it?", previous_response_id=first["id"], stream=False)
    ask(page, input=[{"role": "user", "content": "And?"}], previous_response_id=second["id"])
    page.client.post("/v1/responses", json={"model": "practice", "input": 5})
    ask(page, "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}])
    return page.get("/api/requests")["data"]


def test_requests_of_the_page_are_not_listed(empty_page: PageServer) -> None:
    """They are shown with their conversation."""
    empty_page.create_conversation("Sent by the page")
    assert empty_page.get("/api/requests")["data"] == []


def test_requests_by_other_programs_are_listed(
    page: PageServer, rows: list[dict[str, Any]]
) -> None:
    """Each request has its place in the chain and its savings, and the list has the sums."""
    _, _, *chained = rows
    assert [row["plan"] for row in chained] == ["chained", "chained", "new chain"]
    assert [(row["sent_blocks"], row["full_blocks"]) for row in chained] == [(1, 5), (1, 3), (1, 1)]
    assert all(row["sent_bytes"] < row["full_bytes"] for row in chained[:2])
    sums = page.get("/api/requests")
    assert (sums["requests"], sums["chained"], sums["refused"]) == (5, 2, 1)
    text = page_text(page.client.get("/requests").text)
    assert "5 requests: 2 chained, 1 refused" in text
    assert "new chain new" not in text


def test_requests_of_all_apis_are_listed(rows: list[dict[str, Any]]) -> None:
    """The address of a request names its API."""
    assert rows[0]["upstream"].endswith("/v1/chat/completions")
    assert rows[1]["upstream"].endswith("/v1/responses")


def test_rejected_requests_have_their_error(page: PageServer, rows: list[dict[str, Any]]) -> None:
    """The API and the page of a rejected request have the code and the message of the server."""
    rejected = rows[1]
    assert (rejected["status"], rejected["plan"], rejected["is_refused"]) == (400, "refused", True)
    assert rejected["error_code"] == "invalid_type"
    assert "input" in rejected["error"]
    card = page_text(page.client.get(f"/requests/{rejected['id']}").text)
    assert f"400 {rejected['error_code']}" in card
    assert page_text(rejected["error"]) in card.replace("&#39;", "'")


def test_request_is_shown_with_its_chain(page: PageServer, rows: list[dict[str, Any]]) -> None:
    """A request has the requests before and after it, and its content only if that is stored."""
    last, middle, first = rows[2:]
    request = page.get(f"/api/requests/{middle['id']}")
    assert (request["before"], request["after"]) == ([first["id"]], [last["id"]])
    assert (request["request"], request["response"]) == (None, None)
    text = page_text(page.client.get(f"/requests/{middle['id']}").text)
    assert f"Sent 1 of 3 blocks on {first['response_id']}" in text
    assert f"Request {last['id']} continues it" in text
    assert "--keep-bodies" in text
    full = page_text(page.client.get(f"/requests/{first['id']}").text)
    assert "the input continues no earlier response" in full


@for_each(("digits",), [(30,), (5_000,)])
def test_list_starts_at_any_number(
    page: PageServer, rows: list[dict[str, Any]], digits: int
) -> None:
    """A number above those of a database is before no request, so the newest ones are shown."""
    html = page.client.get(f"/requests?before={'9' * digits}").text
    assert f"{len(rows)} requests" in page_text(html)


def test_keep_bodies_stores_content(tmp_path: Path) -> None:
    """With ``keep_bodies`` the content of streams and conversation objects is stored, also invalid text."""
    with serve_page(tmp_path, keep_bodies=True) as page:
        conversation_id = page.client.post("/v1/conversations", json={}).json()["id"]
        ask(page, input="One", conversation=conversation_id)
        ask(page, input="Two", conversation={"id": conversation_id}, stream=True)
        parts = [{"role": "user", "content": [{"type": "input_text", "text": "In parts"}]}]
        ask(page, input=parts)
        ask(page, "/v1/chat/completions", messages=[{"role": "user", "content": "By chat"}])
        names = re.findall(r'class="name">(.*?)<', page.client.get("/requests").text)
        assert names == ["By chat", "In parts", "Two", "One"]
        _, _, second, first = page.get("/api/requests")["data"]
        assert {first["anchor"], second["anchor"]} == {conversation_id}
        stored = page.get(f"/api/requests/{second['id']}")
        assert '"Two"' in stored["request"]
        assert "response.completed" in stored["response"]
        body = r'{"model": "practice", "input": "half \ud800 pair"}'
        headers = {"content-type": "application/json"}
        assert page.client.post("/v1/responses", content=body, headers=headers).status_code == 400
        row, *_ = page.get("/api/requests")["data"]
        assert r"half \ud800 pair" in page_text(page.client.get(f"/requests/{row['id']}").text)
        assert page.get(f"/api/requests/{row['id']}")["request"] == body


def test_unauthorized_requests_are_not_recorded(tmp_path: Path) -> None:
    """A request without the token has no user who could see it, so it is not recorded."""
    with serve_page(tmp_path, token="secret") as page:
        body = {"model": "practice", "input": "Hello"}
        assert page.client.post("/v1/responses", json=body).status_code == 401
        large = page.client.post("/v1/responses", json=body, headers={"x": "y" * 60_000})
        assert large.status_code == 431
        headers = {"authorization": "Bearer secret"}
        assert page.client.post("/v1/responses", json=body, headers=headers).is_success
        (row,) = page.client.get("/api/requests", headers=headers).json()["data"]
        assert row["status"] == 200
        assert page.client.get("/api/requests").status_code == 401


def test_text_that_no_database_stores_is_escaped(empty_page: PageServer) -> None:
    """A rejected request may have any text as its model; it and the requests beside it are recorded."""
    ask(empty_page, input="Hello")
    for model in (r"\ud800", r"\u0000"):
        body = f'{{"model": "{model}", "input": 5, "previous_response_id": "{model}"}}'
        headers = {"content-type": "application/json"}
        answer = empty_page.client.post("/v1/responses", content=body, headers=headers)
        assert answer.status_code == 400
    ask(empty_page, input="Hello again")
    models = [row["model"] for row in empty_page.get("/api/requests")["data"]]
    assert models == ["practice", r"\x00", r"\ud800", "practice"]


def test_buffered_requests_are_written_at_shutdown(tmp_path: Path) -> None:
    """The last batch is written when the server stops, also requests that claim to be those of the page."""
    with serve_page(tmp_path) as page:
        page.client.headers["x-kedge-page"] = "a guess"
        ask(page, input="Hello")
    with serve_page(tmp_path) as page:
        assert page.get("/api/requests")["requests"] == 1


def make_row(number: int, response: str, previous: str = "") -> ProxiedRequest:
    """Return a recorded request."""
    return ProxiedRequest(1.0, "m", 200, previous, response, 1, 1, 1, 1, upstream="u", id=number)


def test_circular_chain_is_cut() -> None:
    """Ids come from other programs, so a cycle of them must not cause an endless chain."""
    rows = [make_row(1, "a", "c"), make_row(2, "b", "a"), make_row(3, "c", "b"), make_row(4, "")]
    before, after = find_chain(rows, rows[2])
    assert ([row.id for row in before], [row.id for row in after]) == ([1, 2], [1])
    assert find_chain(rows, rows[3]) == ([], [])
