"""Responses while they are generated: concurrency, disconnects, timeouts and shutdown."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import InternalServerError

from for_each import for_each
from kedge.server.models import ItemClosed, OutputEvent, Prompt
from kedge.server.settings import Limits
from kedge.testing import TestServer, serve
from server.conftest import Connect, ask, open_client, rejects
from server.gated_model import GatedModel
from server.waiting import TIMEOUT, wait_until


def abandon_request(server: TestServer, **body: Any) -> None:
    """Request a response, and disconnect while it is generated."""
    raw = json.dumps({"model": "m", "input": "wait", **body}).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n"
    with socket.create_connection(server.address) as connection:
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + raw)
        wait_until(lambda: server.running == 1)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_cancels_the_response(stream: bool, connect: Connect) -> None:
    """The response is stored as cancelled, cannot be continued, and adds nothing to its conversation."""
    model = GatedModel()
    with serve(model=model) as server:
        client = connect(server)
        conversation = client.conversations.create().id
        abandon_request(server, stream=stream, conversation=conversation)
        wait_until(lambda: model.cancelled)
        wait_until(lambda: server.running == 0)
        assert client.conversations.items.list(conversation).data == []
        assert ask(client, "y", conversation=conversation)
        id_ = server.requests[1].response_id
        assert id_ is not None
        response = client.responses.retrieve(id_)
        assert (response.status, response.output) == ("cancelled", [])
        with rejects("previous_response_not_completed", "is cancelled"):
            ask(client, "x", id_)


class LateModel(GatedModel):
    """A model that ends its answer when it is stopped."""

    async def answer(self, prompt: Prompt) -> AsyncIterator[OutputEvent]:
        """Yield an answer."""
        try:
            async for event in super().answer(prompt):
                yield event
        except asyncio.CancelledError:
            yield ItemClosed()


@for_each("model_type", [GatedModel, LateModel])
def test_an_answer_that_takes_too_long_is_failed(
    connect: Connect, model_type: type[GatedModel]
) -> None:
    """An answer that exceeds the time limit is an error for the client and stored as failed."""
    with serve(model=model_type(), limits=Limits(answer_seconds=0)) as server:
        client = connect(server)
        events = list(ask(client, "wait", stream=True))
        assert [event.type for event in events][-2:] == ["error", "response.failed"]
        with pytest.raises(InternalServerError):
            ask(client, "wait")
        id_ = server.requests[-1].response_id
        assert id_ is not None
        assert client.responses.retrieve(id_).status == "failed"


def read_stream(server: TestServer, lines: list[str]) -> None:
    with open_client(server) as http:
        answer = http.post("/v1/responses", json={"model": "m", "input": "wait", "stream": True})
    lines += [line.removeprefix("data: ") for line in answer.text.split("\n") if "data: " in line]


def open_gate_when_stopping(server: TestServer, model: GatedModel) -> None:
    def closed() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(server.address) != 0

    wait_until(closed)
    model.open_gate()


@pytest.mark.parametrize("finishes", [True, False])
def test_stopping_finishes_or_fails_running_responses(tmp_path: Any, finishes: bool) -> None:
    """A stopping server sends the final event of a running response and stores the response."""
    model = GatedModel()
    lines: list[str] = []
    db = str(tmp_path / "server.db")
    limits = Limits(shutdown_seconds=TIMEOUT if finishes else 0)
    with serve(model=model, db=db, limits=limits) as server:
        reader = threading.Thread(target=read_stream, args=(server, lines))
        reader.start()
        wait_until(lambda: server.running == 1)
        if finishes:
            threading.Thread(target=open_gate_when_stopping, args=(server, model)).start()
    reader.join(TIMEOUT)
    status = "completed" if finishes else "failed"
    assert lines[-1] == "[DONE]"
    last = json.loads(lines[-2])
    assert last["type"] == f"response.{status}"
    id_ = last["response"]["id"]
    with serve(db=db) as server, open_client(server) as http:
        assert http.get(f"/v1/responses/{id_}").json() == last["response"]


def test_stopping_ends_a_request_whose_body_is_unfinished(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that never sends its body does not delay a stopping server, and is not logged as an error."""
    monkeypatch.setattr("kedge.server.uvicorn_server.CLOSE_SECONDS", 0.01)
    with socket.socket() as client, serve(limits=Limits(shutdown_seconds=0)) as server:
        client.connect(server.address)
        client.sendall(
            b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
        )
        wait_until(lambda: len(server.requests) == 1)
    assert [each.name for each in caplog.records if each.levelname == "ERROR"] == []
