"""A server whose database file cannot be written, or was removed or replaced: 503 from every route, no lost answer."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from for_each import for_each
from kedge.errors import StoreFull
from kedge.server.storage.database import SQLiteServerDatabase
from kedge.testing import TestServer, serve
from server.conftest import open_client
from server.gated_model import GatedModel
from server.websocket_client import connect_client

LARGE = "x" * 20_000
"""A text that needs new pages of the file."""


def limit_pages(server: TestServer, count: int) -> None:
    """Limit the pages of the database: to those that it has by 1, as a full disk does."""
    limit = f"PRAGMA max_page_count = {count}"
    server.call(lambda service: service._database._connection.execute(limit))  # pyright: ignore[reportAttributeAccessIssue]


def read_health(http: httpx2.Client) -> tuple[int, str]:
    """Return the status code of the health check and the status in its body."""
    answer = http.get("/healthz")
    return answer.status_code, answer.json()["status"]


def check_error(answer: httpx2.Response, folder: Path, problem: str) -> None:
    """Check that a response is the error of the database, without the path of its file."""
    assert answer.status_code == 503, answer.text
    error = answer.json()["error"]
    assert error["code"] == "database_unavailable"
    assert problem in error["message"]
    assert str(folder) not in answer.text


@contextmanager
def serve_on_full_disk(folder: Path) -> Iterator[tuple[TestServer, httpx2.Client, str]]:
    """Run a server whose disk is full, and yield it with a client and the id of a response that was stored before."""
    with (
        serve(db=str(folder / "server.db"), model=GatedModel()) as server,
        open_client(server) as http,
    ):
        stored = http.post("/v1/responses", json={"model": "m", "input": "Hello"}).json()
        assert read_health(http) == (200, "ok")
        limit_pages(server, 1)
        yield server, http, stored["id"]


LARGE_REQUEST = {"model": "m", "input": LARGE}


@for_each("more", [{}, {"stream": True}, {"background": True}, {"input": f"wait {LARGE}"}])
def test_a_full_disk_is_no_internal_error(tmp_path: Path, more: dict[str, Any]) -> None:
    """A response that cannot be stored is answered with 503."""
    with serve_on_full_disk(tmp_path) as (server, http, _):
        answer = http.post("/v1/responses", json={**LARGE_REQUEST, **more})
        check_error(answer, tmp_path, "the disk is full; nothing was written")
        assert server.running == 0


def test_a_conversation_on_a_full_disk_is_rejected(tmp_path: Path) -> None:
    """Its items cannot be stored."""
    items = [{"type": "message", "role": "user", "content": LARGE}]
    with serve_on_full_disk(tmp_path) as (_, http, _):
        answer = http.post("/v1/conversations", json={"items": items})
        check_error(answer, tmp_path, "the disk is full")


def test_what_needs_no_space_works_on_a_full_disk(tmp_path: Path) -> None:
    """Stored responses are read, and unstored ones are generated."""
    with serve_on_full_disk(tmp_path) as (_, http, stored_id):
        assert http.get(f"/v1/responses/{stored_id}").json()["id"] == stored_id
        unstored = http.post("/v1/responses", json={**LARGE_REQUEST, "store": False})
        assert unstored.json()["status"] == "completed"


def test_a_full_disk_is_unhealthy_until_there_is_space(tmp_path: Path) -> None:
    """From the first write that fails on, also if requests succeed that need no space."""
    with serve_on_full_disk(tmp_path) as (server, http, _):
        assert http.post("/v1/responses", json=LARGE_REQUEST).status_code == 503
        assert read_health(http) == (503, "unavailable")
        assert http.post("/v1/responses", json={**LARGE_REQUEST, "store": False}).is_success
        assert read_health(http) == (503, "unavailable")
        limit_pages(server, 1_000_000)
        assert read_health(http) == (200, "ok")
        assert http.post("/v1/responses", json=LARGE_REQUEST).json()["status"] == "completed"


async def test_a_full_disk_is_reported_over_websocket(tmp_path: Path) -> None:
    """A response that cannot be stored ends with the error of the database, and the connection stays open."""
    with serve(db=str(tmp_path / "server.db")) as server:
        async with connect_client(server) as client:
            limit_pages(server, 1)
            failed = await client.create_and_read(LARGE)
            assert failed["error"]["code"] == "database_unavailable"
            assert str(tmp_path) not in json.dumps(failed)
            limit_pages(server, 1_000_000)
            completed = await client.create_and_read(LARGE)
            assert completed["type"] == "response.completed"


def replace_file(path: Path) -> None:
    """Replace a database by a copy of itself."""
    shutil.copy(path, path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)


def remove_files(path: Path) -> None:
    """Remove a database with its journal."""
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()


def remove_journal(path: Path) -> None:
    """Remove only the journal of a database."""
    path.with_name(f"{path.name}-wal").unlink()


@for_each("change", [Path.unlink, replace_file, remove_files, remove_journal])
def test_a_replaced_file_is_noticed(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """No response is acknowledged that would be lost, none is read from the old file, and the health check fails."""
    folder = tmp_path / change.__name__
    folder.mkdir()
    path = folder / "server.db"
    with serve(db=str(path)) as server, open_client(server) as http:
        body = {"model": "m", "input": "Hello"}
        stored = http.post("/v1/responses", json=body).json()
        change(path)
        for answer in (
            http.post("/v1/responses", json=body),
            http.post("/v1/responses", json={**body, "stream": True}),
            http.post("/v1/responses", json={**body, "background": True}),
            http.post("/v1/conversations", json={}),
            http.get(f"/v1/responses/{stored['id']}"),
            http.delete(f"/v1/responses/{stored['id']}"),
        ):
            check_error(answer, tmp_path, "was removed or replaced while it was open")
        assert read_health(http) == (503, "unavailable")


def test_a_file_that_is_replaced_while_a_model_writes_stores_nothing(tmp_path: Path) -> None:
    """The answer of a model that began before is not acknowledged, and neither is the end of its stream."""
    path = tmp_path / "server.db"
    model = GatedModel()
    with serve(db=str(path), model=model) as server, open_client(server) as http:
        body = {"model": "m", "input": "wait for it", "stream": True}
        with http.stream("POST", "/v1/responses", json=body) as stream:
            lines = stream.iter_lines()
            next(line for line in lines if "response.output_text.delta" in line)
            path.unlink()
            model.open_gate()
            rest = "\n".join(lines)
    assert "response.completed" not in rest
    assert "was removed or replaced" in rest
    assert str(tmp_path) not in rest


def test_a_submitted_change_is_made_when_there_is_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A change that failed because the disk was full is tried again by later calls, in its order."""
    database = SQLiteServerDatabase(str(tmp_path / "server.db"))
    made: list[str] = []
    is_full = True

    def change(name: str) -> None:
        if is_full:
            raise StoreFull("the disk is full; nothing was written")
        made.append(name)

    with caplog.at_level(logging.WARNING):
        database.submit(change, "first")
        database.submit(change, "second")
    assert "a change could not be stored: the disk is full" in caplog.text
    assert made == []
    is_full = False
    database.submit(change, "third")
    database.call_failed()
    assert made == ["third", "first", "second"]
    database.close()
