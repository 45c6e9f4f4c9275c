"""Tests of the transports that `chain` wraps: those of other libraries, for some addresses, and of copies."""

import json
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import httpx2
import pytest
from openai import AsyncOpenAI, DefaultAioHttpClient, OpenAI

from chaining.programs import HISTORY, OUTPUT, URL, ask, bodies, message, replay
from kedge.chaining import chain, chain_report, unchain
from kedge.testing import TestServer


class Recorder(httpx2.BaseTransport):
    """A transport of the program, which records what is sent and counts how often it is opened and closed."""

    name = "of the program"

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.opened = self.closed = 0

    def __enter__(self) -> Self:
        self.opened += 1
        return self

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        body = json.loads(b"".join(request.stream))  # type: ignore[arg-type]
        self.sent.append(body)
        names = {
            "id": f"resp_{len(self.sent)}",
            "previous_response_id": body.get("previous_response_id"),
        }
        return httpx2.Response(
            200, json={**names, "object": "response", "status": "completed", "output": OUTPUT}
        )

    def close(self) -> None:
        self.closed += 1


def send_history(http: httpx2.Client) -> None:
    """Send a history and its continuation."""
    for count in (1, 3):
        http.post("/responses", json={"model": "m", "input": HISTORY[:count]})


def test_a_transport_of_the_program_is_used_as_before() -> None:
    """It is opened and closed once with the client, and its members remain available."""
    transport = Recorder()
    with chain(httpx2.Client(transport=transport, base_url=URL)) as http:
        send_history(http)
        assert http._transport.name == "of the program"  # type: ignore[attr-defined]
        with pytest.raises(AttributeError):
            _ = http._transport.missing  # type: ignore[attr-defined]
    assert [len(body["input"]) for body in transport.sent] == [1, 1]
    assert (transport.opened, transport.closed) == (1, 1)
    with pytest.raises(RuntimeError, match="closed"):
        http.post("/responses", json={"input": "a"})


def test_transports_for_some_addresses_are_wrapped_too() -> None:
    """Mounts, with which a client also selects its proxies, share the index; an address without one keeps none."""
    default = Recorder()
    mounted = Recorder()
    mounts = {"https://api.openai.com": mounted, "https://other.example": None}
    with httpx2.Client(transport=default, mounts=mounts, base_url=URL) as http:
        chain(http)
        send_history(http)
        http.post("https://other.example/v1/responses", json={"model": "m", "input": HISTORY[:1]})
        assert chain_report(http).requests == 3
        unchain(http)
        send_history(http)
    assert [len(body["input"]) for body in mounted.sent] == [1, 1, 1, 3]
    assert len(default.sent) == 1
    assert (default.closed, mounted.closed) == (1, 1)


def test_unchain_restores_the_transports() -> None:
    """The client has the objects that it had before, also after it was chained twice."""
    transport = Recorder()
    mounted = Recorder()
    with httpx2.Client(transport=transport, mounts={"https://": mounted}) as http:
        unchain(chain(chain(http)))
        assert http._transport is transport
        assert list(http._mounts.values()) == [mounted]


def test_a_transport_that_was_instrumented_is_called() -> None:
    """Libraries for tracing replace a method of the transport, before or after `chain`."""
    transport = Recorder()
    calls = list[str]()

    def instrument(target: Any, name: str) -> None:
        handle = target.handle_request

        def traced(request: httpx2.Request) -> httpx2.Response:
            calls.append(f"{name} {len(json.loads(request.content)['input'])}")
            return handle(request)

        target.handle_request = traced

    with httpx2.Client(transport=transport, base_url=URL) as http:
        instrument(transport, "sent")
        chain(http)
        instrument(http._transport, "written")
        send_history(http)
    assert calls == ["written 1", "sent 1", "written 3", "sent 1"]


class Lines(httpx2.AsyncByteStream, httpx2.SyncByteStream):
    """A body that can be read once."""

    def __init__(self, content: bytes) -> None:
        self.content = [content]

    def __iter__(self) -> Iterator[bytes]:
        yield self.content.pop()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.content.pop()


class ReadingTransport(Recorder):
    """A transport that reads the body of a response, such as that of a cache."""

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        content = super().handle_request(request).content
        response = httpx2.Response(200, stream=Lines(content), request=request)
        response.read()
        return response


def test_a_response_that_the_transport_has_read_is_not_read_again() -> None:
    """The program gets its content, and the response is an anchor."""
    transport = ReadingTransport()
    with chain(httpx2.Client(transport=transport, base_url=URL)) as http:
        send_history(http)
        response = http.post("/responses", json={"model": "m", "input": HISTORY})
        assert response.json()["output"] == OUTPUT
    assert [len(body["input"]) for body in transport.sent] == [1, 1, 1]


async def test_aiohttp_clients_are_chained(server: TestServer) -> None:
    """Complete and streamed requests over aiohttp are chained and healed."""
    async with AsyncOpenAI(
        base_url=server.base_url, api_key="k", max_retries=0, http_client=DefaultAioHttpClient()
    ) as client:
        chain(client, trust="always")
        history: list[Any] = []
        for number in range(4):
            history.append(message(f"Say {number}"))
            if number == 3:
                server.forget()
            if number % 2:
                async with client.responses.stream(model="practice", input=history) as events:
                    response = await events.get_final_response()
            else:
                response = await client.responses.create(model="practice", input=history)
            assert response.output_text == str(number)
            history += replay(response)
        report = chain_report(client)
    assert (report.requests, report.chained, report.healed) == (4, 2, {"rejected": 1})


def test_copies_of_a_client_share_its_report(server: TestServer) -> None:
    """`copy` and `with_options` return clients with the same HTTP client, also with hooks and headers."""
    with OpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client:
        chain(client)
        history: list[Any] = []
        for each in (client, client.copy(), client.with_options(max_retries=3)):
            ask(each, history, "Say 1")
            assert chain_report(each) == chain_report(client)
        assert chain_report(client).chained == 2
    assert [len(body["input"]) for body in bodies(server)] == [1, 1, 1]


def test_a_forked_process_chains_on_what_it_inherited() -> None:
    """The index in memory is copied to the process, and each process continues on its own."""
    transport = Recorder()
    with chain(httpx2.Client(transport=transport, base_url=URL)) as http:
        http.post("/responses", json={"model": "m", "input": HISTORY[:1]})
        process = os.fork()
        if not process:  # pragma: no cover - another process
            http.post("/responses", json={"model": "m", "input": HISTORY})
            os._exit(0 if len(transport.sent[-1]["input"]) == 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
        assert chain_report(http).requests == 1
