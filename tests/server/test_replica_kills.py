"""``kill -9`` of random servers that share one PostgreSQL database, under load.

No acknowledged response is lost or duplicated, and each model gets exactly the context that its client
sent: the model answers with a digest of its context.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import psycopg

from postgresql import create_schema
from server.conftest import parse_events
from server.replica_process import digest_messages, list_messages
from server.waiting import TIMEOUT, wait_until

KILLS = int(os.environ.get("KEDGE_REPLICA_KILLS", "1"))
REPLICAS = 3
STEPS_BETWEEN_KILLS = 6
STEPS_PER_CHAIN = 20
"""Number of steps after which a client starts with an empty context."""
CHECKED_RESPONSES = 20
"""Number of newest responses that a client retrieves; the others are read from the database."""
RETRY_SECONDS = 0.05
SCRIPT = Path(__file__).with_name("replica_process.py")
TEMPORARY_CODES = {
    "conversation_locked",  # until the lease of a killed server has expired
    "idempotency_key_in_use",
    "database_unavailable",
}

Messages = list[tuple[str, str]]


class Cluster:
    """The servers, which the test kills, and a round-robin balancer."""

    def __init__(self, url: str) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, str(SCRIPT), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])},
        )
        self._servers = [self._start() for _ in range(REPLICAS)]
        self._next = itertools.count()

    def _start(self) -> tuple[int, str]:
        """Start a server and return its process id and address."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write("start\n")
        self._parent.stdin.flush()
        started = json.loads(self._parent.stdout.readline())
        return started["pid"], started["base_url"]

    def choose_url(self) -> str:
        """Return the base URL of the next server, whether or not it is running."""
        return self._servers[next(self._next) % REPLICAS][1]

    def kill_one(self, chosen: int) -> None:
        """Kill a server and start another one."""
        os.kill(self._servers[chosen][0], signal.SIGKILL)
        self._servers[chosen] = self._start()

    def close(self) -> None:
        """Kill all servers."""
        self._parent.communicate(timeout=TIMEOUT)


class Client:
    """A client that retries after every failure and records acknowledged responses."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self.steps = 0
        self.messages: Messages = []
        self.responses: dict[str, Any] = {}
        self.keys: list[str] = []
        self.error: BaseException | None = None
        self._cluster = cluster
        self._http = httpx2.Client(verify=False, timeout=TIMEOUT)

    def run(self, stop: threading.Event) -> None:
        """Send requests until the test stops the client."""
        try:
            with self._http:
                while not stop.is_set():
                    if self.steps % STEPS_PER_CHAIN == 0:
                        self.finish()
                        self.prepare()
                    self.step()
                    self.steps += 1
                self.finish()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error

    def prepare(self) -> None:
        """Start with an empty context."""
        raise NotImplementedError

    def step(self) -> None:
        """Perform one exchange."""
        raise NotImplementedError

    def finish(self) -> None:
        """Check at the end of a chain that its responses are still stored."""
        for id_ in list(self.responses)[-CHECKED_RESPONSES:]:
            assert self.call("GET", f"/responses/{id_}") == self.responses[id_]

    def call(self, method: str, path: str, body: Any = None, key: str = "") -> Any:
        """Send a request to one server after another until one succeeds."""
        return self.repeat(lambda: self._send(method, path, body, key))

    def repeat(self, attempt: Callable[[], Any]) -> Any:
        """Repeat an attempt until it returns an answer."""
        end = time.monotonic() + TIMEOUT
        while True:
            try:
                answer = attempt()
            except (httpx2.TransportError, json.JSONDecodeError):
                answer = None
            if answer is not None:
                return answer
            assert time.monotonic() < end, f"{self.name} got no answer"
            time.sleep(RETRY_SECONDS)

    def _send(self, method: str, path: str, body: Any, key: str) -> Any:
        headers = {"Idempotency-Key": key} if key else {}
        url = self._cluster.choose_url() + path
        answer = self._http.request(method, url, json=body, headers=headers)
        if answer.status_code != 200:
            code = answer.json()["error"]["code"]
            assert code in TEMPORARY_CODES or answer.status_code >= 500, answer.text
            return None
        if not (body or {}).get("stream"):
            return answer.json()
        last = [*parse_events(answer.text.splitlines())][-1]
        return last["response"] if last["type"] == "response.completed" else None

    @property
    def text(self) -> str:
        """Return the user message of the current step."""
        return f"{self.name} {self.steps}"

    def create_response(self, key: str = "", **context: Any) -> Any:
        """Create a response in a context, with or without streaming, and record it."""
        body = {"model": "m", "input": self.text, "stream": self.steps % 2 == 1, **context}
        response = self.call("POST", "/responses", body, key)
        self.record(response, key)
        return response

    def record(self, response: Any, key: str) -> None:
        """Check that the model got exactly the context of the current step, and record the response."""
        self.messages.append(("user", self.text))
        text = response["output"][0]["content"][0]["text"]
        assert response["status"] == "completed"
        digest = digest_messages(self.messages)
        assert text == digest, f"{self.name} got an answer to another context"
        self.messages.append(("assistant", text))
        self.responses[response["id"]] = response
        if key:
            self.keys.append(key)


class ConversationClient(Client):
    """A client that continues one conversation object, with an idempotency key per request."""

    def prepare(self) -> None:
        """Create the conversation."""
        self.conversation = self.call("POST", "/conversations", {})["id"]
        self.messages = []

    def step(self) -> None:
        """Create a response in the conversation, with or without streaming."""
        self.create_response(self.text, conversation=self.conversation)

    def finish(self) -> None:
        """Compare the items of the conversation with the recorded messages."""
        super().finish()
        if self.steps:
            path = f"/conversations/{self.conversation}/items?order=asc&limit=100"
            page = self.call("GET", path)
            assert not page["has_more"]
            assert list_messages(page["data"]) == self.messages


class ChainClient(Client):
    """A client that continues its newest response and retries a failed request from the same one."""

    def prepare(self) -> None:
        """Start without a response."""
        self.previous: str | None = None
        self.messages = []

    def step(self) -> None:
        """Create a response that continues the newest one."""
        self.previous = self.create_response(previous_response_id=self.previous)["id"]


class BackgroundClient(ChainClient):
    """A client that creates background responses and polls or streams them from any server."""

    def step(self) -> None:
        """Create a response, wait for it, and read its events from other servers."""
        body = {"model": "m", "input": self.text, "background": True}
        body["previous_response_id"] = self.previous
        if self.steps % 2:
            id_ = self.repeat(lambda: self._start_stream({**body, "stream": True}, self.text))
            events = self.repeat(lambda: self._read_events(id_))
            numbers = [event["sequence_number"] for event in events]
            assert numbers == list(range(len(events)))
            response = events[-1]["response"]
        else:
            id_ = self.call("POST", "/responses", body, key=self.text)["id"]
            response = self.repeat(lambda: self._read_finished(id_))
        self.previous = id_
        self.record(response, self.text)

    def _start_stream(self, body: Any, key: str) -> str | None:
        """Create a streamed response and disconnect after its first event."""
        headers = {"Idempotency-Key": key}
        url = self._cluster.choose_url() + "/responses"
        with self._http.stream("POST", url, json=body, headers=headers) as stream:
            if stream.status_code != 200:
                return None
            created = next(parse_events(stream.iter_lines()), None)
        return created["response"]["id"] if created else None

    def _read_events(self, id_: str) -> list[Any] | None:
        answer = self._http.get(f"{self._cluster.choose_url()}/responses/{id_}?stream=true")
        if answer.status_code != 200:
            return None
        return list(parse_events(answer.text.splitlines()))

    def _read_finished(self, id_: str) -> Any:
        response = self.call("GET", f"/responses/{id_}")
        return None if response["status"] in {"queued", "in_progress"} else response


def run_clients(cluster: Cluster, chooser: random.Random) -> list[Client]:
    """Run clients and kill a server after every few steps."""
    pairs = (ConversationClient, BackgroundClient)
    kinds = (*pairs, *pairs, ChainClient)
    clients: list[Client] = [kind(cluster, f"client{n}") for n, kind in enumerate(kinds)]
    stop = threading.Event()
    threads = [threading.Thread(target=each.run, args=(stop,)) for each in clients]
    for thread in threads:
        thread.start()

    def has_failed() -> bool:
        return any(each.error is not None for each in clients)

    def count_steps() -> int:
        return sum(each.steps for each in clients)

    try:
        for _ in range(KILLS):
            goal = count_steps() + STEPS_BETWEEN_KILLS
            wait_until(lambda goal=goal: has_failed() or count_steps() >= goal)
            if not has_failed():
                cluster.kill_one(chooser.randrange(REPLICAS))
    finally:
        stop.set()
        for thread in threads:
            thread.join(2 * TIMEOUT)
    for each in clients:
        if each.error is not None:
            raise each.error
    return clients


def read_nodes(url: str) -> Iterator[tuple[Any, ...]]:
    columns = b"id, parent, status, input, output, idempotency_key, key"
    statement = b"SELECT %b FROM kedge_server_nodes" % columns
    with psycopg.connect(url) as connection:
        yield from connection.execute(statement).fetchall()


def test_servers_are_killed_under_load(postgres_url: str) -> None:
    """Each stored answer matches its stored context; ``KEDGE_REPLICA_KILLS`` sets the number of kills."""
    with ExitStack() as stack:
        url = stack.enter_context(create_schema(postgres_url))
        cluster = Cluster(url)
        stack.callback(cluster.close)
        clients = run_clients(cluster, random.Random(18))
        wait_until(
            lambda: not any(node[2] in {"queued", "in_progress"} for node in read_nodes(url))
        )
        nodes = {node[0]: node for node in read_nodes(url)}

        @cache
        def read_context(id_: int | None) -> tuple[Messages, Messages]:
            """Return the context and the answer of a node."""
            if id_ is None:
                return [], []
            _, parent, _, items, output, *_ = nodes[id_]
            above, answers = read_context(parent)
            messages = [*above, *answers, *list_messages(json.loads(items))]
            return messages, list_messages(json.loads(output))

        for id_, _, status, *_ in nodes.values():
            if status == "completed":
                messages, answers = read_context(id_)
                assert answers == [("assistant", digest_messages(messages))]
        keys = [node[5] for node in nodes.values() if node[5] and node[2] == "completed"]
        assert sorted(keys) == sorted(key for client in clients for key in client.keys)
        answered = {node[6]: json.loads(node[4]) for node in nodes.values()}
        for client in clients:
            for id_, response in client.responses.items():
                assert answered[id_.removeprefix("resp_")] == response["output"]
