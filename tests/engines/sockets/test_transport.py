"""ResponsesEngine over WebSocket: chains that only a connection remembers, lanes, accidents."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from engines.conftest import opened
from kedge import Turn, connect, run_sync, user
from kedge.engines import ResponsesEngine
from kedge.engines.sockets import SocketTransport
from kedge.engines.sockets.pool import Pool
from kedge.errors import (
    NotAuthorised,
    RateLimited,
    RequestRefused,
    ServerFailed,
    StreamCut,
    Unreachable,
)
from kedge.events import TextDelta
from kedge.events.run import Healed
from kedge.planning import get_state
from kedge.server.settings import Limits
from kedge.testing import TestServer, serve
from server.models import Gated
from server.sockets.wires import until
from wire import seen, sent

FIRST = "What did I say first?"
UNSTORED: dict[str, Any] = {"store": False}


@pytest.fixture
def model() -> Gated:
    """A model that waits for the test, where it is told to."""
    return Gated()


@pytest.fixture
async def engine(server: TestServer) -> AsyncIterator[ResponsesEngine]:
    """An engine that speaks over WebSocket."""
    async with opened(server, transport="websocket") as made:
        yield made


@pytest.fixture
def gated(model: Gated) -> Iterator[TestServer]:
    """A server with the model that waits."""
    with serve(model=model) as running:
        yield running


async def say(engine: ResponsesEngine, turn: Turn, words: str, **options: Any) -> Turn:
    return await engine.run(turn.append(user(words)), **options)


def pool_of(engine: ResponsesEngine) -> Pool:
    assert isinstance(engine.transport, SocketTransport)
    return engine.transport._pools.get()


def bodies(server: TestServer) -> list[dict[str, Any]]:
    return [each.body for each in server.requests if each.path == "/v1/responses"]


def law(server: TestServer, turn: Turn) -> None:
    """What the model saw last is what the Turn says."""
    assert seen(server.requests[-1].context) == sent(turn)


async def test_what_is_not_stored_chains_on_its_connection(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """Only the new is sent, and nothing of it is in the database."""
    turn = await say(engine, Turn(), "I am Ada.", **UNSTORED)
    asked = turn.append(user(FIRST))
    assert engine.plan(asked).previous_response_id == turn.blocks[-1].response_id
    turn = await engine.run(asked, **UNSTORED)
    assert "I am Ada." in str(turn.blocks[-1])
    assert {each.transport for each in server.requests} == {"websocket"}
    assert [len(body["input"]) for body in bodies(server)] == [1, 1]
    assert "stream" not in server.requests[0].raw.decode() or bodies(server)[0]["stream"] is True
    law(server, turn)


async def test_streams_are_told_as_they_come(gated: TestServer, model: Gated) -> None:
    """The first word is there while the second has not been written."""
    words: list[str] = []
    async with (
        opened(gated, transport="websocket") as engine,
        engine.stream(Turn([user("wait")])) as stream,
    ):
        async for event in stream:
            if isinstance(event, TextDelta):
                words.append(event.delta)
                assert bool(model.ended) is (len(words) > 1)
                model.let_go()
    assert words == ["answer ", "to wait"]


async def test_a_dead_connection_loses_only_what_it_alone_remembered(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """Stored anchors hold on the next connection; unstored ones cost one full send, without a refusal."""
    stored = await say(engine, Turn(), "Stored")
    unstored = await say(engine, Turn(), "Unstored", **UNSTORED)
    server.hang_up()
    await until(lambda: not pool_of(engine).remembered())
    stored = await say(engine, stored, FIRST)
    assert bodies(server)[-1]["previous_response_id"]
    law(server, stored)
    unstored = await say(engine, unstored, FIRST, **UNSTORED)
    assert "previous_response_id" not in bodies(server)[-1]
    law(server, unstored)
    assert all(each.status == 200 for each in server.requests)
    unstored = await say(engine, unstored, "And now?", **UNSTORED)
    assert bodies(server)[-1]["previous_response_id"]
    law(server, unstored)


async def test_a_server_that_forgot_is_healed(engine: ResponsesEngine, server: TestServer) -> None:
    """It refuses, and gets everything."""
    turn = await say(engine, Turn(), "One", **UNSTORED)
    server.forget()
    async with engine.stream(turn.append(user("Two")), **UNSTORED) as stream:
        events = [event async for event in stream]
    assert [event.reason for event in events if isinstance(event, Healed)] == ["gone"]
    law(server, stream.turn)


async def test_two_branches_of_what_is_not_stored(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """The first goes on where both were; for the second everything is sent. Neither sees the other."""
    turn = await say(engine, Turn(), "Common", **UNSTORED)
    left = await say(engine, turn, "Left", **UNSTORED)
    law(server, left)
    right = await say(engine, turn, "Right", **UNSTORED)
    law(server, right)
    assert [("previous_response_id" in body) for body in bodies(server)] == [False, True, False]
    left = await say(engine, left, FIRST, **UNSTORED)
    law(server, left)
    assert bodies(server)[-1]["previous_response_id"]


async def test_a_fork_while_its_origin_moves_on(gated: TestServer, model: Gated) -> None:
    """Both branches continue one unstored response at once, each on a lane of its own."""
    async with opened(gated, transport="websocket") as engine:
        turn = await say(engine, Turn(), "Common", **UNSTORED)
        left = asyncio.create_task(say(engine, turn, "wait left", **UNSTORED))
        await until(lambda: "wait left" in model.begun)
        right = await say(engine, turn, "right", **UNSTORED)
        assert bodies(gated)[-1]["previous_response_id"] == turn.blocks[-1].response_id
        model.let_go()
        await left
        assert sum("previous_response_id" in body for body in bodies(gated)) == 2
        assert "wait left" not in str(right.blocks)


async def test_many_conversations_share_a_few_connections(server: TestServer) -> None:
    """Each chains on its own memory, round after round, whatever the others do."""
    count = 24
    async with opened(server, transport="websocket", connections=2) as engine:
        turns = [Turn() for _ in range(count)]
        for number in range(3):
            said = [
                say(engine, turn, f"{at}.{number}", **UNSTORED) for at, turn in enumerate(turns)
            ]
            turns = list(await asyncio.gather(*said))
        assert server.call(lambda service: len(service.sockets)) <= 2
    for exchange in server.requests:
        texts = [item["content"][0]["text"] for item in exchange.context or ()]
        mine = {text.partition(".")[0] for text in texts[::2]}
        assert len(mine) == 1
    chained = [body for body in bodies(server) if "previous_response_id" in body]
    assert len(chained) == 2 * count


async def test_more_requests_than_lanes_wait(gated: TestServer, model: Gated) -> None:
    """One after the other, where there is one lane; none is lost."""
    async with opened(gated, transport="websocket", connections=1, lanes=2) as engine:
        waiting = [
            asyncio.create_task(engine.run(Turn([user(f"wait {n}")]), **UNSTORED)) for n in range(6)
        ]
        await until(lambda: len(model.begun) == 2)
        model.let_go()
        turns = await asyncio.gather(*waiting)
    assert sorted(model.ended) == [f"wait {n}" for n in range(6)]
    assert len({turn.blocks[-1].response_id for turn in turns}) == 6


async def test_a_server_without_lanes_gets_one_at_a_time(server: TestServer) -> None:
    """With one lane for a connection no name is sent."""
    async with opened(server, transport="websocket", lanes=1, connections=2) as engine:
        turn = await say(engine, Turn(), "I am Ada.", **UNSTORED)
        turn = await say(engine, turn, FIRST, **UNSTORED)
        assert "I am Ada." in str(turn.blocks[-1])
        lanes = [lane.name for each in pool_of(engine)._connections for lane in each.lanes]
    assert lanes == [""]


async def test_leaving_a_stream_stops_the_work(gated: TestServer, model: Gated) -> None:
    """Where nothing else is on the connection, it is closed; the next request opens another."""
    async with opened(gated, transport="websocket") as engine:
        async with engine.stream(Turn([user("wait")])) as stream:
            async for event in stream:
                if isinstance(event, TextDelta):
                    break
        await until(lambda: model.stopped == ["wait"])
        await until(lambda: gated.running == 0)
        turn = await say(engine, Turn(), "hello")
        law(gated, turn)


async def test_leaving_a_stream_leaves_the_others_alone(gated: TestServer, model: Gated) -> None:
    """Where others are on the connection, what nobody reads is read to its end and thrown away."""
    async with opened(gated, transport="websocket", connections=1) as engine:
        other = asyncio.create_task(engine.run(Turn([user("wait other")]), **UNSTORED))
        await until(lambda: model.begun)
        async with engine.stream(Turn([user("wait left")])) as stream:
            async for event in stream:
                if isinstance(event, TextDelta):
                    break
        assert pool_of(engine)._connections[0].in_flight == 2
        model.let_go()
        turn = await other
        await until(lambda: pool_of(engine)._connections[0].in_flight == 0)
        assert gated.call(lambda service: len(service.sockets)) == 1
        turn = await say(engine, turn, "and", **UNSTORED)
        assert bodies(gated)[-1]["previous_response_id"]
        law(gated, turn)


async def test_a_cancelled_run_gives_its_lane_back(gated: TestServer, model: Gated) -> None:
    """Also one that had not heard anything yet, and one that still waited for a lane."""
    async with opened(gated, transport="websocket", connections=1, lanes=1) as engine:
        first = asyncio.create_task(engine.run(Turn([user("wait 1")])))
        await until(lambda: model.begun)
        second = asyncio.create_task(engine.run(Turn([user("wait 2")])))
        await asyncio.sleep(0)
        for task in (second, first):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        turn = await asyncio.wait_for(say(engine, Turn(), "hello"), 30)
        law(gated, turn)


async def test_an_old_connection_is_replaced_without_loss(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """The server closes it after its time: the request goes to the next one, healed where need be."""
    stored = await say(engine, Turn(), "Stored")
    unstored = await say(engine, Turn(), "Unstored", **UNSTORED)
    server.clock.advance(seconds=3600)
    stored = await say(engine, stored, FIRST)
    assert bodies(server)[-1]["previous_response_id"]
    law(server, stored)
    unstored = await say(engine, unstored, FIRST, **UNSTORED)
    law(server, unstored)


async def test_a_connection_is_retired_before_the_server_does(
    engine: ResponsesEngine, server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two requests, so that nobody notices."""
    turn = await say(engine, Turn(), "One")
    first = pool_of(engine)._connections[0]
    monkeypatch.setattr("kedge.engines.sockets.pool.LIFETIME", -1.0)
    turn = await say(engine, turn, "Two")
    assert first not in pool_of(engine)._connections
    law(server, turn)


async def test_a_failed_continuation_is_not_built_upon(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """The server has evicted the parent, and we know without asking."""
    turn = await say(engine, Turn(), "One", **UNSTORED)
    with pytest.raises(RequestRefused):
        await say(engine, turn, "Two", temperature=7, **UNSTORED)
    turn = await say(engine, turn, "Two", **UNSTORED)
    assert "previous_response_id" not in bodies(server)[-1]
    assert [each.status for each in server.requests] == [200, 400, 200]
    law(server, turn)


@pytest.mark.parametrize("fault", ["cut_after_events=0", "cut_after_events=4", "cut_in_event=3"])
async def test_a_cut_is_an_error_that_loses_nothing(
    engine: ResponsesEngine, server: TestServer, fault: str
) -> None:
    """The Turn it carries can be sent again."""
    turn = await say(engine, Turn(), "One")
    server.faults.set(fault, times=1)
    with pytest.raises(StreamCut) as caught:
        async with engine.stream(turn.append(user("Write 50 words."))) as stream:
            await stream.finish()
    assert caught.value.turn is not None
    assert caught.value.retryable
    turn = await engine.run(caught.value.turn)
    law(server, turn)


async def test_refusals_are_the_errors_of_http(engine: ResponsesEngine, server: TestServer) -> None:
    """By their status, with the server's words and its advice when to come again."""
    server.faults.set("status=429,retry_after=7", times=1)
    with pytest.raises(RateLimited) as limited:
        await engine.run(Turn([user("x")]))
    assert limited.value.retry_after == 7
    server.faults.set("status=503", times=1)
    with pytest.raises(ServerFailed):
        await engine.run(Turn([user("x")]))
    with pytest.raises(RequestRefused, match="Unknown parameter: 'bogus'") as refused:
        await engine.run(Turn([user("x")]), bogus=1)
    assert refused.value.param == "bogus"


@pytest.mark.parametrize("fault", ["status=429,retry_after=0", "status=500", "cut_after_events=0"])
async def test_what_may_be_tried_again_is(server: TestServer, fault: str) -> None:
    """As often as the client is told to, and before anything was heard."""
    async with opened(server, transport="websocket", max_retries=1) as engine:
        server.faults.set(fault, times=1)
        turn = await say(engine, Turn(), "One")
    assert len(server.requests) == 2
    law(server, turn)


async def test_a_server_that_asks_for_an_hour_is_not_waited_for(server: TestServer) -> None:
    """Whoever asked is told when to come again, though there were tries left."""
    async with opened(server, transport="websocket", max_retries=1) as engine:
        server.faults.set("status=429,retry_after=3600", times=1)
        with pytest.raises(RateLimited) as limited:
            await asyncio.wait_for(engine.run(Turn([user("x")])), 30)
    assert limited.value.retry_after == 3600
    assert len(server.requests) == 1


async def test_conversation_objects_are_never_sent_to_blindly(
    server: TestServer,
) -> None:
    """The first try may have been taken down already."""
    async with opened(server, transport="websocket", max_retries=3, mode="conversation") as engine:
        turn = await say(engine, Turn(), "One")
        server.faults.set("cut_after_events=0", times=1)
        with pytest.raises(StreamCut):
            await say(engine, turn, "Two")
        turn = await say(engine, turn, "Two")
        law(server, turn)


async def test_a_closed_door_is_told_at_once() -> None:
    """A wrong key, a server that takes no sockets, and none at all: three errors that say so."""
    with serve(token="right") as server:
        async with opened(server, transport="websocket", api_key="wrong-key") as engine:
            with pytest.raises(NotAuthorised) as caught:
                await engine.run(Turn([user("x")]))
        assert "wrong-key" not in str(caught.value)
        engine = connect(
            f"responses:{server.url}/elsewhere#m",
            transport="websocket",
            max_retries=0,
            api_key="right",
        )
        async with engine:
            with pytest.raises(RequestRefused, match="takes no WebSocket"):
                await engine.run(Turn([user("x")]))
        gone = f"responses:{server.base_url}#m"
    async with connect(gone, transport="websocket", max_retries=0) as engine:
        with pytest.raises(Unreachable):
            await engine.run(Turn([user("x")]))


async def test_silence_has_an_end(gated: TestServer, model: Gated) -> None:
    """As long as the client's patience, before the answer and within it."""
    async with opened(gated, transport="websocket", timeout=0.05) as engine:
        with pytest.raises((StreamCut, Unreachable), match=r"fell silent|in time"):
            await engine.run(Turn([user("wait")]))
        gated.faults.set("slow_first_byte=30", times=1)
        with pytest.raises(Unreachable, match="in time"):
            await engine.run(Turn([user("x")]))


async def test_a_stop_of_the_server_is_told(model: Gated) -> None:
    """An answer that was given up is a failure, not half an answer."""
    with serve(model=model, limits=Limits(shutdown_seconds=0)) as server:
        async with opened(server, transport="websocket") as engine:
            running = asyncio.create_task(engine.run(Turn([user("wait")])))
            await until(lambda: model.begun)
            await asyncio.to_thread(server.stop)
            with pytest.raises(ServerFailed):
                await running


async def test_requests_beside_the_conversation_go_over_http(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """They do not count on what only a connection remembers."""
    turn = await say(engine, Turn(), "I am Ada.", **UNSTORED)
    assert await engine.count_tokens(turn) > 0
    assert (await engine.verify(turn)).agrees is None
    assert [each.status for each in server.requests if "input_tokens" in each.path] == [200]


def test_scripts_may_use_it_too(server: TestServer) -> None:
    """Every loop has connections of its own, and closes them."""
    engine = connect(f"responses:{server.base_url}#practice", transport="websocket")
    turn = run_sync(engine.run(Turn([user("I am Ada.")]), **UNSTORED))
    assert engine.plan(turn.append(user("x"))).is_full
    turn = run_sync(engine.run(turn.append(user(FIRST)), **UNSTORED))
    assert "I am Ada." in str(turn.blocks[-1])
    assert get_state(turn).anchors[-1].stored is False


async def test_the_practice_model_speaks_over_sockets() -> None:
    """The embedded server does what any other does."""
    async with connect("practice", transport="websocket") as engine:
        turn = await engine.run(Turn([user("What is 2+3?")]), store=False)
    assert "5" in str(turn.blocks[-1])


async def test_a_tap_hears_what_went_over_the_wire(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """The request as it was sent, the messages of the answer, and refusals with their status."""
    heard: list[tuple[bytes, bytes, int | None]] = []

    def tap(request: bytes, reply: bytes, status: int | None) -> None:
        heard.append((request, reply, status))

    await engine.run(Turn([user("Hello")]), tap=tap)
    with pytest.raises(RequestRefused):
        await engine.run(Turn([user("Hello")]), tap=tap, bogus=1)
    (request, reply, status), (_, refused, refused_status) = heard
    assert b'"stream"' not in request
    assert b"response.completed" in reply
    assert (status, refused_status) == (200, 400)
    assert b"bogus" in refused


async def test_a_server_that_says_everything_twice(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """No answer is taken for the answer to the next request."""
    server.faults.set("duplicate_events")
    turn = Turn()
    for number in range(4):
        turn = await say(engine, turn, f"Line {number}", **UNSTORED)
        law(server, turn)
    assert len({block.response_id for block in turn.blocks if block.response_id}) == 4
