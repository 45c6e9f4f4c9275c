"""Statements that read or write megabytes: in a thread of their own, in the order of all others."""

import asyncio
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from kedge.server.storage.database import SQLiteServerDatabase
from kedge.server.storage.responses import ResponseRepository
from kedge.testing import serve
from server.conftest import open_client
from server.waiting import GIVE_UP, TIMEOUT, wait_until, wait_until_async

LARGE_TEXT = "word " * 250_000


class CallLog:
    """Functions that note their names and threads; the first one waits for the test."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.calls: list[tuple[str, bool]] = []

    def note(self, name: str) -> str:
        is_main = threading.current_thread() is threading.main_thread()
        self.calls.append((name, is_main))
        return name

    def wait(self, name: str) -> str:
        assert self.may_end.wait(TIMEOUT)
        return self.note(name)


async def test_all_functions_run_in_the_order_of_their_calls(tmp_path: Path) -> None:
    """While a long one runs, the loop goes on, and the others wait in its thread; afterwards they do not."""
    database = SQLiteServerDatabase(str(tmp_path / "server.db"))
    log = CallLog()
    assert await database.run(log.note, "before") == "before"
    long_call = asyncio.create_task(database.run(log.wait, "long", is_long=True))
    await asyncio.sleep(0)
    assert not database.is_free
    database.submit(log.note, "submitted")
    cancelled = asyncio.create_task(database.run(log.note, "cancelled"))
    short_call = asyncio.create_task(database.run(log.note, "short"))
    await asyncio.sleep(0)
    cancelled.cancel()
    log.may_end.set()
    assert await long_call == "long"
    assert await short_call == "short"
    await wait_until_async(lambda: database.is_free)
    assert await database.run(log.note, "after") == "after"
    in_thread = [(name, False) for name in ("long", "submitted", "cancelled", "short")]
    assert log.calls == [("before", True), *in_thread, ("after", True)]
    database.close()


async def test_closing_waits_for_what_was_submitted(tmp_path: Path) -> None:
    """Nothing that was acknowledged is lost."""
    database = SQLiteServerDatabase(str(tmp_path / "server.db"))
    log = CallLog()
    database.submit(log.wait, "long", is_long=True)
    database.submit(database.get_or_add_fact, "written", b"last")
    log.may_end.set()
    database.close()
    reopened = SQLiteServerDatabase(str(tmp_path / "server.db"))
    assert reopened.get_or_add_fact("written", b"") == b"last"
    assert not reopened.unclean_shutdown
    reopened.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_large_response_is_stored_beside_other_requests(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """While its megabytes are written, the server answers; requests to the database wait for their turn."""
    name = "begin" if stream else "settle"
    method = getattr(ResponseRepository, name)
    started = threading.Event()
    may_end = threading.Event()
    was_stopped: list[bool] = []

    def store_slowly(self: ResponseRepository, entry: Any, *args: Any, **options: Any) -> Any:
        if len(entry.input) > 1_000_000:
            started.set()
            was_stopped.append(may_end.wait(GIVE_UP))
        return method(self, entry, *args, **options)

    monkeypatch.setattr(ResponseRepository, name, store_slowly)
    body = {"model": "m", "input": LARGE_TEXT, "truncation": "auto", "stream": stream}
    answers: list[Any] = []
    with serve() as server, open_client(server) as http, open_client(server) as other:
        large = threading.Thread(
            target=lambda: answers.append(http.post("/v1/responses", json=body))
        )
        large.start()
        wait_until(started.is_set)
        assert other.get("/healthz").json() == {"status": "ok"}
        may_end.set()
        small = other.post("/v1/responses", json={"model": "m", "input": "Hello"})
        large.join(TIMEOUT)
    assert small.json()["status"] == "completed"
    assert answers[0].status_code == 200
    assert was_stopped == [True]


def test_a_client_that_leaves_while_its_response_is_stored_cancels_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The response is stored as cancelled after it was stored as in progress."""
    begin = ResponseRepository.begin
    started = threading.Event()
    may_end = threading.Event()

    def begin_slowly(self: ResponseRepository, *args: Any, **options: Any) -> None:
        started.set()
        assert may_end.wait(TIMEOUT)
        begin(self, *args, **options)

    monkeypatch.setattr(ResponseRepository, "begin", begin_slowly)
    body = {"model": "m", "input": LARGE_TEXT, "truncation": "auto", "stream": True}
    raw = json.dumps(body).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n"
    with serve() as server, open_client(server) as http:
        with socket.create_connection(server.address) as connection:
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + raw)
            wait_until(started.is_set)
        wait_until(lambda: server.running == 0)
        may_end.set()
        id_ = server.requests[0].response_id
        assert http.get(f"/v1/responses/{id_}").json()["status"] == "cancelled"
