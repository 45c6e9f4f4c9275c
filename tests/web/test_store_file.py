"""The page and its API while the store cannot be written, or after its file was removed or replaced."""

from pathlib import Path
from typing import Any

import httpx2

from kedge.web.service import ConversationService
from web.conftest import PageServer, serve_page

LARGE = "x" * 50_000
"""A text that needs new pages of the file."""


def check_error(answer: httpx2.Response, folder: Path, problem: str) -> None:
    """Check that a response says what is wrong with the store, without the path of its file."""
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["code"] == "store"
    assert problem in answer.json()["error"]["message"]
    assert str(folder) not in answer.text


def limit_pages(page: PageServer, count: int) -> None:
    """Limit the pages of the store: to those that it has by 1, as a full disk does."""

    async def work(service: ConversationService) -> Any:
        limit = f"PRAGMA max_page_count = {count}"
        return await service.store.database.write(lambda tx: tx.rows(limit))

    page.run(work)


def test_a_full_disk_is_reported_without_the_path(tmp_path: Path) -> None:
    """The API and a followed run say that the disk is full, the health check fails, and both work again."""
    with serve_page(tmp_path) as page:
        name = page.create_conversation()
        limit_pages(page, 1)
        path = f"/api/conversations/{name}/runs"
        answer = page.client.post(path, json={"message": LARGE})
        check_error(answer, tmp_path, "the disk is full; nothing was written")
        stream = page.client.post(path, json={"message": LARGE, "stream": True})
        assert "the disk is full; nothing was written" in stream.text
        assert str(tmp_path) not in stream.text
        assert page.client.get("/healthz").json()["status"] == "unavailable"
        limit_pages(page, 1_000_000)
        assert page.client.get("/healthz").json() == {"status": "ok"}
        assert page.post(path, message=LARGE)["node"]


def test_a_replaced_store_is_reported_without_the_path(tmp_path: Path) -> None:
    """Nothing is read from the old file or written to it, by the page, the API and the health check."""
    with serve_page(tmp_path) as page:
        name = page.create_conversation("Hello")
        assert page.client.get("/healthz").status_code == 200
        for file in tmp_path.glob("kedge.db*"):
            file.unlink()
        problem = "was removed or replaced while it was open"
        for answer in (
            page.client.get(f"/api/conversations/{name}"),
            page.client.post("/api/conversations", json={}),
            page.client.post(f"/api/conversations/{name}/runs", json={"message": "Hello"}),
        ):
            check_error(answer, tmp_path, problem)
        html = page.client.get(f"/conversations/{name}")
        assert (html.status_code, problem in html.text) == (503, True)
        assert str(tmp_path) not in html.text
        health = page.client.get("/healthz")
        assert (health.status_code, health.json()["status"]) == (503, "unavailable")
