"""``kill -9`` during writes: finished responses are stored, unfinished ones are failed."""

import json
import os
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from forked import ForkedProcess
from kedge.testing import TestServer, serve
from server.conftest import open_client, parse_events
from server.waiting import TIMEOUT, wait_until

KILLS = int(os.environ.get("KEDGE_KILLS", "1"))
SERVE = ["-m", "kedge", "serve", "--port", "0", "--json", "--pace", "0.001", "--no-page"]


@dataclass
class RecordingClient:
    """A client that records the responses it received."""

    base_url: str
    finished: dict[str, Any] = field(default_factory=dict[str, Any])
    started: set[str] = field(default_factory=set[str])

    def run_until_killed(self) -> None:
        """Chain responses with and without streaming until the server is killed."""
        with (
            httpx2.Client(base_url=self.base_url, verify=False, timeout=TIMEOUT) as http,
            suppress(httpx2.TransportError),
        ):
            while True:
                answer = http.post("/responses", json=self.make_body()).json()
                self.finished[answer["id"]] = answer
                body = {**self.make_body(), "stream": True}
                with http.stream("POST", "/responses", json=body) as stream:
                    for event in parse_events(stream.iter_lines()):
                        if event["type"] == "response.created":
                            self.started.add(event["response"]["id"])
                        if event["type"] == "response.completed":
                            self.finished[event["response"]["id"]] = event["response"]

    def make_body(self) -> dict[str, Any]:
        """Return the body of a request that continues the last finished response."""
        previous = list(self.finished)[-1] if self.finished else None
        return {"model": "m", "input": "some words to say", "previous_response_id": previous}


def kill_server(db: Path) -> list[RecordingClient]:
    """Serve several clients, then kill the server."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with ForkedProcess([*SERVE, "--db", str(db)], **pipes) as process:
        assert process.stdout is not None
        base_url = json.loads(process.stdout.readline())["base_url"]
        clients = [RecordingClient(base_url) for _ in range(4)]
        threads = [threading.Thread(target=client.run_until_killed) for client in clients]
        for thread in threads:
            thread.start()
        wait_until(lambda: all(len(client.finished) >= 5 for client in clients))
        process.kill()
        for thread in threads:
            thread.join(TIMEOUT)
    return clients


@pytest.mark.parametrize("attempt", range(KILLS))
def test_killed_server_retains_every_finished_response(tmp_path: Path, attempt: int) -> None:
    """After a restart the database is intact, and each chain of responses can be continued."""
    db = tmp_path / "server.db"
    clients = kill_server(db)
    with serve(db=str(db)) as server, open_client(server) as http:
        assert server.call(lambda service: service._database.unclean_shutdown)
        assert read_row(server, "PRAGMA integrity_check") == ("ok",)
        assert read_row(server, COUNT_IN_PROGRESS) == (0,)
        for client in clients:
            check_finished(http, client)
            check_unfinished(http, client)
            assert http.post("/v1/responses", json=client.make_body()).status_code == 200
            assert len(server.requests[-1].context or ()) == 2 * len(client.finished) + 1


COUNT_IN_PROGRESS = "SELECT count(*) FROM kedge_server_nodes WHERE status = 'in_progress'"


def read_row(server: TestServer, statement: str) -> Any:
    """Return the result of a statement on the database of a server."""
    return server.call(lambda service: service._database.execute(statement).fetchone())


def check_finished(http: httpx2.Client, client: RecordingClient) -> None:
    """Check that the responses that a client received are stored."""
    for id_, finished in client.finished.items():
        assert http.get(f"/v1/responses/{id_}").json() == finished


def check_unfinished(http: httpx2.Client, client: RecordingClient) -> None:
    """Check that no response whose end a client did not receive is in progress."""
    for id_ in client.started - client.finished.keys():
        stored = http.get(f"/v1/responses/{id_}").json()
        # The last one may have been completed before its client was notified.
        assert stored["status"] in {"failed", "completed"}
        assert (stored["status"] == "failed") is bool(stored["error"])
