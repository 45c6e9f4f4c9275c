"""WebSocket mode over real sockets: chains, lanes, limits, errors and closing."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI
from openai.resources.responses.responses import AsyncResponsesConnection
from openai.types.responses import Response
from openai.types.websocket_reconnection import ReconnectingEvent
from websockets.exceptions import ConnectionClosed, InvalidStatus

from for_each import for_each
from kedge.server.settings import Limits
from kedge.testing import TestServer, serve
from server.conftest import CheckEvent
from server.gated_model import GatedModel
from server.waiting import TIMEOUT, wait_until_async
from server.websocket_client import WebSocketClient, connect_client, response_text

ADA = 'You said first: "I am Ada."'


@pytest.fixture
async def ws_client(server: TestServer) -> AsyncIterator[WebSocketClient]:
    """Yield a connection to the server."""
    async with connect_client(server) as client:
        yield client


@asynccontextmanager
async def connect_gated(
    **settings: Any,
) -> AsyncIterator[tuple[TestServer, GatedModel, WebSocketClient]]:
    """Yield a server with a gated model, the model, and a connection."""
    model = GatedModel()
    with serve(model=model, **settings) as server:
        async with connect_client(server) as ws_client:
            yield server, model, ws_client


async def read_completed(connection: AsyncResponsesConnection) -> Response:
    """Read events with the official client and return the completed response."""
    async for event in connection:
        if event.type == "response.completed":
            return event.response
    raise AssertionError("the connection was closed")


async def recall(client: WebSocketClient, previous: str, **body: Any) -> str:
    """Continue a response, and return what its model knows of the first message, or the code of the error."""
    body = {"prompt": "What did I say first?", "previous_response_id": previous, **body}
    ended = await client.create_and_read(**body)
    return ended["error"]["code"] if ended["type"] == "error" else response_text(ended)


NOT_FOUND = "previous_response_not_found"


async def test_official_client_reconnects(server: TestServer) -> None:
    """The official client chains unstored responses, gets typed errors, and reconnects after the close code."""
    client = AsyncOpenAI(base_url=server.base_url, api_key="any")
    close_codes: list[int] = []

    def reconnecting(event: ReconnectingEvent) -> None:
        close_codes.append(event.close_code)

    connecting = client.responses.connect(on_reconnecting=reconnecting, initial_delay=0)
    async with client, connecting as connection:
        ask = connection.response.create
        await ask(model="m", input="I am Ada.", store=False)
        first = (await read_completed(connection)).id
        prompt = "What did I say first?"
        await ask(model="m", input=prompt, store=False, previous_response_id=first, stream_id="x")
        assert (await connection.recv()).stream_id == "x"
        assert (await read_completed(connection)).output_text == ADA
        server.clock.advance(seconds=3600)
        await ask(model="m", input="One")
        rejected = await connection.recv()
        assert rejected.type == "error"
        assert rejected.error.code == "websocket_connection_limit_reached"
        assert (await connection.recv()).type == "error"
        task = asyncio.create_task(read_completed(connection))
        await wait_until_async(lambda: close_codes)
        await wait_until_async(lambda: server.call(lambda service: len(service.sockets)) == 1)
        await ask(model="m", input="Two")
        assert (await asyncio.wait_for(task, TIMEOUT)).status == "completed"
    assert close_codes == [1001]


async def test_events_equal_those_of_a_stream(
    ws_client: WebSocketClient, check_event: CheckEvent
) -> None:
    """Events have the format of a stream and are numbered from 0 in each response."""
    for _ in range(2):
        await ws_client.create("Think about tea.")
        events = await ws_client.read_response()
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[0]["type"] == "response.created"
        for event in events:
            check_event(event)


async def test_the_newest_unstored_response_of_a_lane_is_remembered(
    server: TestServer, ws_client: WebSocketClient
) -> None:
    """Any lane of its connection, and no other, continues it until all is forgotten; no database has it."""
    first = await ws_client.create_unstored("I am Ada.", stream_id="a")
    async with connect_client(server) as other:
        assert await recall(other, first) == NOT_FOUND
    fork = await ws_client.create_unstored("Two", stream_id="b", previous_response_id=first)
    await ws_client.create_unstored("Three", stream_id="a", previous_response_id=first)
    assert await recall(ws_client, first, store=False, stream_id="c") == NOT_FOUND
    assert await recall(ws_client, fork, store=False) == ADA
    assert server.call(lambda service: service.responses.find(fork)) is None
    server.forget()
    assert await recall(ws_client, fork, store=False) == NOT_FOUND


async def test_zero_data_retention_allows_connection_memory() -> None:
    """Nothing is stored, but the newest response of a connection can be continued, also after a compaction."""
    with serve(zero_data_retention=True) as server:
        async with connect_client(server) as ws_client:
            first = await ws_client.create_unstored("I am Ada.")
            compaction: Any = [{"type": "compaction_trigger"}]
            ended = await ws_client.create_and_read(compaction, previous_response_id=first)
            assert ended["response"]["store"] is False
            assert await recall(ws_client, ended["response"]["id"]) == ADA
            assert await recall(ws_client, ended["response"]["id"]) == NOT_FOUND


@pytest.mark.parametrize(
    ("lane", "store", "remembered"), [("a", False, False), ("b", False, True), ("a", True, True)]
)
async def test_a_failed_continuation_evicts_its_parent_on_the_same_lane(
    ws_client: WebSocketClient, lane: str, store: bool, remembered: bool
) -> None:
    """A failed request evicts the previous response of its lane; one of another lane, or stored, can be continued."""
    first = (await ws_client.create_and_read("One", stream_id="a", store=store))["response"]["id"]
    other = await ws_client.create_unstored("I am Ada.", stream_id="b")
    orphan = [{"type": "function_call_output", "call_id": "call_x", "output": "x"}]
    for prompt, stream_id, is_accepted in ((orphan, lane, False), ("Two", "a", remembered)):
        ended = await ws_client.create_and_read(
            prompt, stream_id=stream_id, previous_response_id=first, store=False
        )
        assert (ended["type"] == "response.completed") is is_accepted
        assert is_accepted or ended["status"] == 400
    assert await recall(ws_client, other, store=False) == ADA


async def test_stored_response_includes_its_unstored_ancestors(
    server: TestServer, ws_client: WebSocketClient
) -> None:
    """The unstored ancestors of a stored response are stored with it, and count for its continuations."""
    first = await ws_client.create_unstored("I am Ada.")
    second = await ws_client.create_unstored("I like tea.", previous_response_id=first)
    ended = await ws_client.create_and_read("And now?", previous_response_id=second)
    stored = ended["response"]["id"]
    server.call(lambda service: service.nodes.cache.clear())
    tokens: set[int] = set()
    for _ in range(2):
        async with connect_client(server) as other:
            answer = await other.create_and_read("What did I say?", previous_response_id=stored)
        tokens.add(answer["response"]["usage"]["input_tokens"])
    assert len(tokens) == 1
    exchange = server.requests[-1]
    assert (exchange.method, exchange.path, exchange.status) == ("POST", "/v1/responses", 200)
    assert (exchange.transport, exchange.body["previous_response_id"]) == ("websocket", stored)
    roles = [item["role"] for item in exchange.context or ()]
    assert roles == ["user", "assistant"] * 3 + ["user"]


async def test_warm_up_has_no_output_and_can_be_continued(ws_client: WebSocketClient) -> None:
    """``generate: false`` stores the context and does not call the model."""
    for store in (True, False):
        warm = await ws_client.create_and_read("I am Ada.", generate=False, store=store)
        assert warm["type"] == "response.completed"
        assert warm["response"]["output"] == []
        usage = warm["response"]["usage"]
        assert usage["output_tokens"] == 0 < usage["input_tokens"]
        assert await recall(ws_client, warm["response"]["id"], store=False) == ADA


async def test_lanes_are_independent_queues() -> None:
    """Requests of one lane run in order; those of another wait only while the limit of all is reached."""
    async with connect_gated(limits=Limits(socket_in_flight=2)) as (_, model, ws_client):
        await ws_client.create("wait one", stream_id="slow")
        await ws_client.create("two", stream_id="slow")
        await ws_client.create("three", stream_id="quick")
        quick = await ws_client.read_response("quick")
        assert response_text(quick[-1]) == "answer to three"
        for lane in "ab":
            await ws_client.create(f"wait {lane}", stream_id=lane)
        await wait_until_async(lambda: len(model.started) == 3)
        await ws_client.send(type="nonsense")
        rejected = (await ws_client.read_response())[-1]
        assert rejected["type"] == "error"  # so the earlier messages were processed
        assert model.started == ["wait one", "three", "wait a"]
        model.open_gate()
        ended: dict[str, list[str]] = {"slow": [], "a": [], "b": []}
        while sum(map(len, ended.values())) < 4:
            event = await ws_client.next_event()
            if event["type"] == "response.completed":
                ended[event["stream_id"]].append(response_text(event))
        assert ended["slow"] == ["answer to wait one", "answer to two"]


@pytest.mark.parametrize("limits", [Limits(socket_waiting=2), Limits(body_bytes=200)])
async def test_requests_above_the_queue_limit_are_rejected(limits: Limits) -> None:
    """A request that does not fit in the queue is rejected; queued requests are answered."""
    async with connect_gated(limits=limits) as (_, model, ws_client):
        for number in range(4):
            await ws_client.create(f"wait {number}")
            await wait_until_async(lambda: model.started)
        await ws_client.send()  # rejected when the earlier messages were processed
        codes: list[str] = []
        while "missing_required_parameter" not in codes:
            codes.append((await ws_client.read_response())[-1]["error"]["code"])
        assert codes == ["websocket_queue_full", "missing_required_parameter"]
        model.open_gate()
        for number in range(3):
            ended = await ws_client.read_response()
            assert response_text(ended[-1]) == f"answer to wait {number}"
        assert (await ws_client.create_and_read())["type"] == "response.completed"


async def test_number_of_lanes_is_limited() -> None:
    """A lane above the limit is rejected, and an invalid name; the lane without a name does not count."""
    with serve(limits=Limits(socket_lanes=2)) as server:
        async with connect_client(server) as ws_client:
            for name in ("", "a b", "ä", "x" * 257, 7, None):
                await ws_client.create(stream_id=name)
                rejected = await ws_client.next_event()
                assert (rejected["status"], rejected["error"]["code"]) == (400, "invalid_stream_id")
                assert "stream_id" not in rejected
            for lane in (None, "a", "b", "a"):
                params = {} if lane is None else {"stream_id": lane}
                assert (await ws_client.create_and_read(**params))["type"] == "response.completed"
            rejected = await ws_client.create_and_read(stream_id="c")
            assert rejected["stream_id"] == "c"
            error = rejected["error"]
            assert (error["param"], error["code"]) == (
                "stream_id",
                "websocket_stream_limit_reached",
            )
            assert "stream IDs (2). Reuse an existing stream_id" in error["message"]


@for_each(
    ("members", "code", "param"),
    [
        ("{", None, None),
        ("[]", "invalid_type", None),
        ("{}", "missing_required_parameter", "type"),
        ('{"type": "response.steer"}', "invalid_value", "type"),
        ('"input": "x"', "missing_required_parameter", "model"),
        ('"model": "m"', "missing_required_parameter", "input"),
        ('"model": "m", "input": "\\ud800"', "invalid_value", "input"),
        (
            '"model": "m", "input": "x", "background": true',
            "unsupported_parameter",
            "background",
        ),
        ('"model": "m", "input": "x", "generate": "no"', "invalid_type", "generate"),
        ('"model": "m", "input": "x", "streams": "a"', "unknown_parameter", "streams"),
    ],
)
async def test_invalid_message_is_rejected(
    ws_client: WebSocketClient, members: str, code: str | None, param: str | None
) -> None:
    """An invalid message gets an error event with a status, and the connection stays open."""
    is_create = members.startswith('"')
    message = f'{{"type": "response.create", {members}}}' if is_create else members
    await ws_client.connection.send(message)
    rejected = await ws_client.next_event()
    assert (rejected["type"], rejected["status"]) == ("error", 400)
    assert (rejected["error"]["code"], rejected["error"]["param"]) == (code, param)
    assert (await ws_client.create_and_read())["type"] == "response.completed"


async def test_connection_has_a_maximum_age() -> None:
    """New requests are then rejected, and running responses end before the close; an idle one is closed."""
    async with connect_gated() as (server, model, ws_client):
        await ws_client.create("wait")
        await wait_until_async(lambda: model.started)
        server.clock.advance(seconds=3600)
        late = await ws_client.create_and_read(stream_id="late")
        assert late["error"]["code"] == "websocket_connection_limit_reached"
        assert "(60 minutes)" in late["error"]["message"]
        model.open_gate()
        assert response_text((await ws_client.read_response())[-1]) == "answer to wait"
        assert await ws_client.wait_closed() == 1001
    with serve(limits=Limits(socket_seconds=0)) as server:
        async with connect_client(server) as ws_client:
            error = (await ws_client.next_event())["error"]
            assert error["code"] == "websocket_connection_limit_reached"
            assert await ws_client.wait_closed() == 1001


@pytest.mark.parametrize("finishes", [True, False])
async def test_stopping_server_finishes_or_fails_running_responses(finishes: bool) -> None:
    """A response ends, or fails after the timeout, before the connection is closed with the restart code."""
    limits = Limits(shutdown_seconds=TIMEOUT if finishes else 0)
    async with connect_gated(limits=limits) as (server, model, ws_client):
        await ws_client.create("wait")
        await wait_until_async(lambda: model.started)
        stopping = asyncio.create_task(asyncio.to_thread(server.stop))
        if finishes:
            await wait_until_async(lambda: not server._server.servers[0].is_serving())
            model.open_gate()
            assert response_text((await ws_client.read_response())[-1]) == "answer to wait"
            assert (await ws_client.next_event())["error"]["code"] == "server_stopping"
        else:
            error = (await ws_client.read_response())[-1]["error"]
            assert (error["type"], error["code"]) == ("server_error", "server_error")
            assert (await ws_client.next_event())["type"] == "response.failed"
        assert await ws_client.wait_closed() == 1012
        await asyncio.wait_for(stopping, TIMEOUT)


async def test_disconnect_cancels_every_lane() -> None:
    """A disconnect cancels the model on every lane, and queued requests never start."""
    async with connect_gated(limits=Limits(socket_in_flight=2)) as (server, model, ws_client):
        for text in ("wait a", "wait b", "never b", "never c"):
            await ws_client.create(text, stream_id=text[-1])
        await wait_until_async(lambda: len(model.started) == 2)
        await ws_client.connection.close()
        await wait_until_async(lambda: len(model.cancelled) == 2)
        await wait_until_async(lambda: server.running == 0)
        assert server.call(lambda service: len(service.sockets)) == 0
    assert model.started == ["wait a", "wait b"]


async def test_a_client_that_leaves_is_not_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """A connection that ends while a model writes cancels its responses; nothing has failed."""
    with serve(model=GatedModel(words=1_000_000)) as server:
        async with connect_client(server) as ws_client:
            for lane in ("a", "b"):
                await ws_client.create("x", stream_id=lane)
            await ws_client.next_event()
            ws_client.connection.transport.abort()
        await wait_until_async(lambda: server.call(lambda service: not service.sockets))
        assert server.running == 0
        ids = [request.response_id for request in server.requests]
        with httpx2.Client(base_url=server.base_url, verify=False, timeout=TIMEOUT) as http:
            answers = [http.get(f"/responses/{id_}").json() for id_ in ids]
    assert {answer["status"] for answer in answers} == {"cancelled"}
    assert not [each for each in caplog.records if each.levelname in ("WARNING", "ERROR")]


@for_each(
    ("message", "is_text", "code"),
    [("x" * 2_000, True, 1009), (b"{}", False, 1003), (b"\xff", True, 1007)],
)
async def test_a_large_or_binary_message_closes_the_connection(
    message: str | bytes, is_text: bool, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A message above the limit, or one that is no text, closes the connection with a code, without an error."""
    with serve(limits=Limits(body_bytes=1000)) as server:
        async with connect_client(server) as ws_client:
            await ws_client.connection.send(message, text=is_text)
            assert await ws_client.wait_closed() == code
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


async def reject_handshake(server: TestServer, **options: Any) -> tuple[int, Any]:
    """Return the status of a rejected handshake, and its error."""
    with pytest.raises(InvalidStatus) as exc_info:
        async with connect_client(server, **options):
            pass
    response = exc_info.value.response
    assert response.headers["x-request-id"].startswith("req_")
    return response.status_code, json.loads(response.body or b"")["error"]


async def test_handshake_requires_the_token() -> None:
    """A handshake without the token is rejected with an error in the API's format."""
    right = {"Authorization": "Bearer secret"}
    with serve(token="secret") as server:
        status, error = await reject_handshake(server)
        assert status == 401
        assert "You didn't provide an API key" in error["message"]
        async with connect_client(server, additional_headers=right) as ws_client:
            assert (await ws_client.create_and_read())["type"] == "response.completed"


@for_each("headers", [{"x-long": "a" * 9_000}, {f"x-{number}": "" for number in range(150)}])
async def test_a_handshake_with_too_large_headers_is_answered(
    server: TestServer, headers: dict[str, str]
) -> None:
    """Headers that a request may have, but not a handshake, are a 400 error instead of no answer."""
    with pytest.raises(InvalidStatus) as exc_info:
        async with connect_client(server, additional_headers=headers):
            pass
    assert exc_info.value.response.status_code == 400
    assert b"at most 128 headers" in (exc_info.value.response.body or b"")


async def test_foreign_origins_and_other_paths_are_rejected(
    server: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A handshake from a page of another origin is rejected, without an error in the log; an own one is accepted."""
    for origin in ("https://evil.example", "http://localhost:3000", "null"):
        headers = {"Origin": origin}
        status, error = await reject_handshake(server, additional_headers=headers)
        assert (status, error["code"]) == (403, "origin_not_allowed")
    with pytest.raises(InvalidStatus):
        async with connect_client(server, path="/conversations"):
            pass
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
    async with connect_client(server, additional_headers={"Origin": server.url}) as ws_client:
        ended = await ws_client.create_and_read(stream=False, background=False)  # without effect
    assert ended["type"] == "response.completed"


@pytest.mark.parametrize("fault", ["cut_after_events=0", "cut_after_events=3", "cut_in_event=2"])
async def test_cut_closes_the_connection(
    server: TestServer, ws_client: WebSocketClient, fault: str
) -> None:
    """A cut closes the connection, and the response is cancelled."""
    server.faults.set(fault, times=1)
    await ws_client.create("Write 50 words.")
    events = [await ws_client.next_event() for _ in range(int(fault[-1]))]
    assert all(event["type"].startswith("response.") for event in events)
    with pytest.raises(ConnectionClosed):
        await ws_client.next_event()
    await wait_until_async(lambda: server.running == 0)


async def test_faults_apply_to_events(server: TestServer, ws_client: WebSocketClient) -> None:
    """An error event has the status, headers and format of the fault, and events are changed as in a stream."""
    server.faults.set("status=429,retry_after=2", times=1)
    rejected = await ws_client.create_and_read(stream_id="a")
    assert (rejected["status"], rejected["stream_id"]) == (429, "a")
    assert rejected["error"]["headers"]["retry-after"] == "2"
    assert rejected["error"]["headers"]["x-request-id"] == server.requests[-1].request_id
    server.faults.set("not_found=ogx", times=1)
    rejected = await ws_client.create_and_read(previous_response_id="resp_x")
    assert rejected["status"] == 404
    assert rejected["error"]["detail"] == "Response 'resp_x' not found."
    server.faults.set("duplicate_events,only=response.created", times=1)
    await ws_client.create()
    types = [event["type"] for event in await ws_client.read_response()]
    assert types[:3] == ["response.created", "response.created", "response.in_progress"]


@pytest.mark.parametrize(
    ("name", "code"), [("QueuedRequest", 1006), ("AsgiBridge._forward_event", 1011)]
)
async def test_unexpected_error_closes_only_the_connection(
    server: TestServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    code: int,
) -> None:
    """The log has the type of the error without its message, and the server continues to work."""

    def broken(*_: object) -> None:
        raise ValueError("the words of a conversation")

    monkeypatch.setattr(f"kedge.server.websocket.{name}", broken)
    async with connect_client(server) as ws_client:
        await ws_client.create()
        assert await ws_client.wait_closed() == code
    monkeypatch.undo()
    assert "failed with an internal error: ValueError" in caplog.text
    assert "the words of a conversation" not in caplog.text
    async with connect_client(server) as ws_client:
        ended = await ws_client.create_and_read()
    assert ended["type"] == "response.completed"
