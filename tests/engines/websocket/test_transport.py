"""Test ResponsesEngine over WebSocket: chains within a connection, lanes, and failures."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from websockets.asyncio.server import Server, ServerConnection
from websockets.asyncio.server import serve as serve_socket

from engines.conftest import open_link
from engines.runs import Link, read_until
from for_each import for_each
from kedge import Turn, assistant, connect, run_sync, user
from kedge.engines.websocket import SocketTransport
from kedge.engines.websocket.connection import ConnectionPool
from kedge.errors import (
    NotAuthorized,
    RateLimited,
    RequestRefused,
    ServerFailed,
    StreamCut,
    Unreachable,
)
from kedge.events import TextDelta
from kedge.planning import get_state
from kedge.server.settings import Limits
from kedge.testing import TestServer, serve
from server.gated_model import GatedModel
from server.waiting import wait_until_async as wait_until

FIRST_QUESTION = "What did I say first?"
UNSTORED: dict[str, Any] = {"store": False}
SOCKET: dict[str, Any] = {"transport": "websocket"}


@pytest.fixture
def model() -> GatedModel:
    """Return a model that waits for the test where a message asks for it."""
    return GatedModel()


@pytest.fixture
def settings() -> dict[str, Any]:
    """Return the settings of an engine that uses WebSocket."""
    return SOCKET


@pytest.fixture
def gated_server(model: GatedModel) -> Iterator[TestServer]:
    """Yield a server with the waiting model."""
    with serve(model=model) as server:
        yield server


@pytest.fixture
async def gated(gated_server: TestServer) -> AsyncIterator[Link]:
    """Yield an engine that uses WebSocket, and a server with the waiting model."""
    async with open_link(gated_server, **SOCKET) as opened:
        yield opened


async def send(link: Link, turn: Turn, text: str) -> Turn:
    """Send a message whose answer is not stored."""
    return await link.send(text, turn=turn, store=False)


def is_chained(link: Link) -> bool:
    """Return whether the newest request used the context of a response."""
    return "previous_response_id" in link.bodies[-1]


def get_pool(link: Link) -> ConnectionPool:
    assert isinstance(link.engine.transport, SocketTransport)
    return link.engine.transport._pools.get()


async def test_unstored_responses_are_chained_on_their_connection(link: Link) -> None:
    """Only new blocks are sent, over the connection that has the unstored response."""
    turn = await send(link, Turn(), "I am Ada.")
    requested = turn.append(user(FIRST_QUESTION))
    assert link.engine.plan(requested).previous_response_id == turn.blocks[-1].response_id
    turn = await link.engine.run(requested, **UNSTORED)
    assert "I am Ada." in str(turn.blocks[-1])
    assert {each.transport for each in link.server.requests} == {"websocket"}
    assert link.lengths == [1, 1]
    assert all(body.get("stream", True) for body in link.bodies)
    link.check_law(turn)


async def test_a_server_that_rejects_chaining_is_recognized_by_an_unstored_response(
    link: Link,
) -> None:
    """A rejection of the parameter concerns all responses, not only the one that its connection had."""
    turn = await send(link, Turn(), "I am Ada.")
    link.server.faults.set("refuse_previous_response_id=zdr")
    turn = await send(link, turn, FIRST_QUESTION)
    assert link.engine.plan(turn.append(user("And now?"))).mode_reason == "unsupported"


async def test_streams_are_passed_on_as_they_arrive(gated: Link, model: GatedModel) -> None:
    """The first delta is yielded before the second has been generated."""
    deltas: list[str] = []
    async with gated.engine.stream(Turn([user("wait")])) as stream:
        async for event in stream:
            if isinstance(event, TextDelta):
                if not deltas:
                    assert model.finished == []
                    model.open_gate()
                deltas.append(event.delta)
    assert deltas == ["answer ", "to wait"]


async def test_closed_connection_loses_unstored_responses_only(link: Link) -> None:
    """Stored anchors remain valid on the next connection; unstored ones cost one full send."""
    stored = await link.send("Stored")
    unstored = await send(link, Turn(), "Unstored")
    link.server.hang_up()
    await wait_until(lambda: not get_pool(link).live_response_ids())
    stored = await link.send(FIRST_QUESTION, turn=stored)
    assert is_chained(link)
    link.check_law(stored)
    for text, expected in ((FIRST_QUESTION, False), ("And now?", True)):
        unstored = await send(link, unstored, text)
        assert is_chained(link) is expected
        link.check_law(unstored)
    assert all(each.status == 200 for each in link.server.requests)


async def test_concurrent_fork_of_an_unstored_response(gated: Link, model: GatedModel) -> None:
    """Both branches continue one unstored response concurrently, each on its own lane."""
    turn = await send(gated, Turn(), "Common")
    left = asyncio.create_task(send(gated, turn, "wait left"))
    await wait_until(lambda: "wait left" in model.started)
    right = await send(gated, turn, "right")
    assert gated.bodies[-1]["previous_response_id"] == turn.blocks[-1].response_id
    model.open_gate()
    await left
    assert sum("previous_response_id" in body for body in gated.bodies) == 2
    assert "wait left" not in str(right.blocks)


async def test_many_conversations_share_a_few_connections(server: TestServer) -> None:
    """Each conversation is chained on its own responses, independent of the others."""
    turns = [Turn()] * 24
    async with open_link(server, **SOCKET, connections=2) as link:
        for number in range(3):
            sent = (send(link, turn, f"{at}.{number}") for at, turn in enumerate(turns))
            turns = list(await asyncio.gather(*sent))
        assert server.call(lambda service: len(service.sockets)) <= 2
    for exchange in server.requests:
        texts = [item["content"][0]["text"] for item in exchange.context or ()]
        assert len({text.partition(".")[0] for text in texts[::2]}) == 1
    assert sum("previous_response_id" in body for body in link.bodies) == 2 * len(turns)


async def test_more_requests_than_lanes_wait(gated_server: TestServer, model: GatedModel) -> None:
    """Requests wait for a free lane, and none is lost."""
    lines = [f"wait {number}" for number in range(6)]
    async with open_link(gated_server, **SOCKET, connections=1, lanes=2) as link:
        waiting = [asyncio.create_task(send(link, Turn(), line)) for line in lines]
        await wait_until(lambda: len(model.started) == 2)
        model.open_gate()
        turns = await asyncio.gather(*waiting)
    assert sorted(model.finished) == lines
    assert len({turn.blocks[-1].response_id for turn in turns}) == 6


async def test_single_lane_has_no_name(server: TestServer) -> None:
    """With one lane per connection no lane name is sent."""
    async with open_link(server, **SOCKET, lanes=1, connections=2) as link:
        turn = await link.send("I am Ada.", FIRST_QUESTION, **UNSTORED)
        assert "I am Ada." in str(turn.blocks[-1])
        lanes = [lane.name for each in get_pool(link)._connections for lane in each.lanes]
    assert lanes == [""]


async def test_closing_a_stream_does_not_affect_others(
    gated_server: TestServer, model: GatedModel
) -> None:
    """On a shared connection, the events of a closed stream are read to the end and discarded."""
    async with open_link(gated_server, **SOCKET, connections=1) as link:
        other = asyncio.create_task(send(link, Turn(), "wait other"))
        await wait_until(lambda: model.started)
        async with link.engine.stream(Turn([user("wait left")])) as stream:
            await read_until(stream)
        (connection,) = get_pool(link)._connections
        assert sum(lane.busy for lane in connection.lanes) == 2
        model.open_gate()
        turn = await other
        await wait_until(lambda: not any(lane.busy for lane in connection.lanes))
        assert gated_server.call(lambda service: len(service.sockets)) == 1
        turn = await send(link, turn, "and")
        assert is_chained(link)
        link.check_law(turn)


async def test_cancelled_run_releases_its_lane(gated_server: TestServer, model: GatedModel) -> None:
    """A lane is released also by a run without any events yet, one still waiting for a lane, and a rejected one."""
    async with open_link(gated_server, **SOCKET, connections=1, lanes=1) as link:
        first = asyncio.create_task(link.send("wait 1"))
        await wait_until(lambda: model.started)
        second = asyncio.create_task(link.send("wait 2"))
        await asyncio.sleep(0)
        for task in (second, first):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        with pytest.raises(RequestRefused):
            await link.send("hello", temperature=7)
        link.check_law(await asyncio.wait_for(link.send("hello"), 60))


async def test_closing_a_stream_keeps_what_its_connection_remembers(
    gated: Link, model: GatedModel
) -> None:
    """A connection with an unstored response is not closed to stop another answer."""
    turn = await send(gated, Turn(), "One")
    async with gated.engine.stream(Turn([user("wait left")]), **UNSTORED) as stream:
        await read_until(stream)
    model.open_gate()
    await send(gated, turn, "Two")
    assert is_chained(gated)


async def test_an_old_connection_is_replaced_without_loss(link: Link) -> None:
    """When the server closes an old connection, the request uses a new one and is healed if necessary."""
    stored = await link.send("Stored")
    unstored = await send(link, Turn(), "Unstored")
    link.server.clock.advance(seconds=3600)
    stored = await link.send(FIRST_QUESTION, turn=stored)
    assert is_chained(link)
    link.check_law(stored)
    link.check_law(await send(link, unstored, FIRST_QUESTION))


async def test_connection_is_replaced_before_the_server_closes_it(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old connection is replaced between two requests."""
    turn = await link.send("One")
    (first,) = get_pool(link)._connections
    monkeypatch.setattr("kedge.engines.websocket.connection.MAX_CONNECTION_AGE", -1.0)
    turn = await link.send("Two", turn=turn)
    assert first not in get_pool(link)._connections
    link.check_law(turn)


async def test_failed_continuation_is_no_anchor(link: Link) -> None:
    """The server has evicted the parent, so the next request is sent in full without trying it."""
    turn = await send(link, Turn(), "One")
    with pytest.raises(RequestRefused):
        await link.send("Two", turn=turn, temperature=7, **UNSTORED)
    turn = await send(link, turn, "Two")
    assert not is_chained(link)
    assert [each.status for each in link.server.requests] == [200, 400, 200]
    link.check_law(turn)


@pytest.mark.parametrize("fault", ["status=429,retry_after=0", "status=500", "cut_after_events=0"])
async def test_retryable_errors_are_retried(server: TestServer, fault: str) -> None:
    """Retries are limited by ``max_retries`` and happen only before the first event."""
    async with open_link(server, **SOCKET, max_retries=1) as link:
        server.faults.set(fault, times=1)
        turn = await link.send("One")
    assert len(server.requests) == 2
    link.check_law(turn)


async def test_long_retry_delay_is_raised(server: TestServer) -> None:
    """A long retry delay raises an error at once, although retries are left."""
    async with open_link(server, **SOCKET, max_retries=1) as link:
        server.faults.set("status=429,retry_after=3600", times=1)
        with pytest.raises(RateLimited) as limited:
            await asyncio.wait_for(link.send("x"), 300)
    assert limited.value.retry_after == 3600
    assert len(server.requests) == 1


async def test_requests_to_conversation_objects_are_not_retried(server: TestServer) -> None:
    """The first attempt may already have been added to the object."""
    async with open_link(server, **SOCKET, max_retries=3, mode="conversation") as link:
        turn = await link.send("One")
        server.faults.set("cut_after_events=0", times=1)
        with pytest.raises(StreamCut):
            await link.send("Two", turn=turn)
        link.check_law(await link.send("Two", turn=turn))


async def test_failed_connection_is_reported() -> None:
    """A wrong key, a missing WebSocket endpoint and a missing server raise different errors."""
    with serve(token="right") as server:
        for address, key, error, match in (
            (server.base_url, "wrong-key", NotAuthorized, "401"),
            (f"{server.url}/elsewhere", "right", RequestRefused, "has no WebSocket endpoint"),
            (server.base_url, "k" * 9_000, RequestRefused, "its answer: .* at most 128 headers"),
        ):
            model = f"responses:{address}#m"
            async with connect(model, **SOCKET, max_retries=0, api_key=key) as engine:
                with pytest.raises(error, match=match) as exc_info:
                    await engine.run(Turn([user("x")]))
            assert "wrong-key" not in str(exc_info.value)
        address = f"responses:{server.base_url}#m"
    async with connect(address, **SOCKET, max_retries=0) as engine:
        with pytest.raises(Unreachable):
            await engine.run(Turn([user("x")]))


@pytest.mark.parametrize("status", [300, 301, 307])
@pytest.mark.parametrize("is_other_origin", [False, True])
async def test_redirect_is_not_followed(status: int, is_other_origin: bool) -> None:
    """A redirect cannot send the conversation and the key elsewhere; the error names the address."""
    received: list[str] = []

    async def accept(connection: ServerConnection) -> None:
        received.append("opened")

    async with serve_socket(accept, "127.0.0.1", 0) as other:
        target = f"ws://127.0.0.1:{get_port(other)}/v1/responses"

        def redirect(connection: ServerConnection, request: Any) -> Any:
            if request.path != "/v1/responses":
                return None
            response = connection.respond(status, "moved")
            response.headers["Location"] = f"{target}?a" if is_other_origin else "/elsewhere?a"
            return response

        async with serve_socket(accept, "127.0.0.1", 0, process_request=redirect) as server:
            model = f"responses:http://127.0.0.1:{get_port(server)}/v1#m"
            async with connect(model, **SOCKET, api_key="sk-secret") as engine:
                expected = target if is_other_origin else "/elsewhere"
                with pytest.raises(RequestRefused, match=f"redirects to {expected};") as exc_info:
                    await engine.run(Turn([user("x")]))
    assert received == []
    assert (exc_info.value.status, exc_info.value.retryable) == (status, False)
    assert "no WebSocket endpoint" not in str(exc_info.value)


HEADERS = {"Retry-After": 7, "X-Request-Id": "req_1"}
ERROR = {"code": "rate_limit_exceeded", "message": "Slow down.", "param": None}


def get_port(server: Server) -> int:
    return next(iter(server.sockets)).getsockname()[1]


async def run_on_socket(
    handle: Callable[[ServerConnection], Awaitable[None]], times: int = 1
) -> list[Turn]:
    """Run a Turn several times on one connection to a server with this handler."""
    async with serve_socket(handle, "127.0.0.1", 0) as server:
        model = f"responses:http://127.0.0.1:{get_port(server)}/v1#m"
        async with connect(model, **SOCKET, lanes=1, max_retries=0) as engine:
            return [await engine.run(Turn([user("x")])) for _ in range(times)]


@for_each(
    "error",
    [
        {"status": 429, **ERROR, "headers": HEADERS},
        {"status": 429, "error": ERROR, "headers": HEADERS},
        {"status_code": 429, "error": {**ERROR, "headers": HEADERS}},
    ],
)
async def test_a_rejection_of_any_form_is_raised_with_its_message(error: dict[str, Any]) -> None:
    """Errors are nested or flat, with headers beside the error or within it, whose names are in any case."""

    async def reject(socket: ServerConnection) -> None:
        async for _ in socket:
            await socket.send(json.dumps({"type": "error", **error}))

    with pytest.raises(RateLimited) as exc_info:
        await run_on_socket(reject)
    assert (exc_info.value.message, exc_info.value.code) == ("Slow down.", "rate_limit_exceeded")
    assert (exc_info.value.retry_after, exc_info.value.request_id) == (7, "req_1")


CREATED = {"type": "response.created", "response": {"id": "resp_1"}}
ITEM = {"type": "message", "id": "m", "role": "assistant", "content": "Hello"}
DELTA = {"type": "response.output_text.delta", "item_id": "m", "output_index": 0, "delta": "Hello"}


@for_each(
    ("messages", "expected"),
    [
        (["ping", CREATED, DELTA, "pong", [ITEM]], "Hello"),
        ([CREATED, DELTA, [ITEM]], "Hello"),
        ([DELTA, []], "Hello"),
        ([CREATED, DELTA, '{"type":', []], "could not be parsed"),
        ([CREATED, "Internal Server Error"], "after a message that is not JSON"),
        (["Unauthorized"], "no response: .* after a message that is not JSON"),
    ],
)
async def test_messages_of_an_odd_server(messages: list[Any], expected: str) -> None:
    """A message that is not JSON does not end the connection; a missing start does not lose deltas."""

    async def answer(socket: ServerConnection) -> None:
        async for _ in socket:
            for each in messages:
                if isinstance(each, list):
                    response = {"id": "resp_1", "status": "completed", "output": each}
                    await socket.send(
                        json.dumps({"type": "response.completed", "response": response})
                    )
                else:
                    await socket.send(each if isinstance(each, str) else json.dumps(each))
            if not isinstance(messages[-1], list):
                return  # which closes the connection

    if expected == "Hello":
        turns = await run_on_socket(answer, times=2)
        assert [turn.blocks[-1] for turn in turns] == [assistant("Hello")] * 2
    else:
        with pytest.raises((StreamCut, ServerFailed), match=expected):
            await run_on_socket(answer)


async def test_timeout_applies_to_events(gated_server: TestServer) -> None:
    """The client's timeout applies before the answer and within it."""
    async with open_link(gated_server, **SOCKET, timeout=0.05) as link:
        with pytest.raises((StreamCut, Unreachable), match=r"in time"):
            await link.send("wait")
        gated_server.faults.set("slow_first_byte=30", times=1)
        with pytest.raises(Unreachable, match="in time"):
            await link.send("x")


async def test_server_shutdown_is_reported(model: GatedModel) -> None:
    """An answer that the server aborts is a failure, not a partial answer."""
    with serve(model=model, limits=Limits(shutdown_seconds=0)) as server:
        async with open_link(server, **SOCKET) as link:
            task = asyncio.create_task(link.send("wait"))
            await wait_until(lambda: model.started)
            await asyncio.to_thread(server.stop)
            with pytest.raises(ServerFailed):
                await task


@for_each("size", [20_000, 5_000_000])
async def test_a_request_that_is_too_large_is_refused(size: int) -> None:
    """The server closes its connection, so the request is not sent again; smaller ones are."""
    with serve(limits=Limits(body_bytes=10_000)) as server:
        async with open_link(server, **SOCKET, max_retries=2) as link:
            sends = [link.send(text) for text in ("x" * size, "a", "b")]
            large, *others = await asyncio.gather(*sends, return_exceptions=True)
            assert isinstance(large, RequestRefused)
            assert large.status == 413
            assert "accepts no WebSocket message of" in large.message
            assert all(isinstance(other, Turn) for other in others)


async def test_other_requests_use_http(link: Link) -> None:
    """Token counts and audits use HTTP and do not rely on unstored responses."""
    turn = await send(link, Turn(), "I am Ada.")
    assert await link.engine.count_tokens(turn) > 0
    assert (await link.engine.verify(turn)).agrees is None
    assert [each.status for each in link.server.requests if "input_tokens" in each.path] == [200]


def test_sync_code_can_use_websocket(server: TestServer) -> None:
    """Every event loop has its own connections and closes them."""
    engine = connect(f"responses:{server.base_url}#practice", **SOCKET)
    turn = run_sync(engine.run(Turn([user("I am Ada.")]), **UNSTORED))
    assert engine.plan(turn.append(user("x"))).is_full
    turn = run_sync(engine.run(turn.append(user(FIRST_QUESTION)), **UNSTORED))
    assert "I am Ada." in str(turn.blocks[-1])
    assert get_state(turn).anchors[-1].stored is False


async def test_a_tap_receives_what_was_transmitted(link: Link) -> None:
    """A tap receives the request as sent, the messages of the answer, and errors with their status."""
    received: list[tuple[bytes, bytes, int | None]] = []

    def tap(request: bytes, reply: bytes, status: int | None) -> None:
        received.append((request, reply, status))

    await link.send("Hello", tap=tap)
    with pytest.raises(RequestRefused):
        await link.send("Hello", tap=tap, extra_body={"bogus": 1})
    (request, reply, status), (_, rejected, refused_status) = received
    assert b'"stream"' not in request
    assert b"response.completed" in reply
    assert (status, refused_status) == (200, 400)
    assert b"bogus" in rejected
