"""One record of each request: in the log, in the reply and in the store, with the sizes of its body."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from msgspec.structs import replace

from engines.conftest import open_engine
from engines.runs import read_until
from kedge import Chat, Conversation, open_store
from kedge._internal.display import format_size
from kedge.engines import Engine, Events, Request
from kedge.errors import EngineError
from kedge.events import ResponseStarted
from kedge.events.run import RequestSent
from kedge.middleware import BaseMiddleware, with_middleware
from kedge.observe.logs import get_fields
from kedge.planning import find_running, get_state, set_state
from kedge.providers import connect
from kedge.testing import TestServer
from kedge.turns import Turn, dumps, loads, system, user
from server.waiting import wait_until_async


def read_requests(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return the fields of the log records of requests."""
    fields = [dict(get_fields(record)) for record in caplog.records]
    return [each for each in fields if "sent_bytes" in each]


def list_posts(server: TestServer) -> list[Any]:
    """Return the requests for an answer that the server received."""
    return [each for each in server.requests if each.path == "/v1/responses"]


async def test_a_failed_answer_keeps_its_response_id(server: TestServer, tmp_path: Path) -> None:
    """The row of a stream that was cut or stopped has the id that the server sent at its start."""
    async with open_engine(server) as engine, open_store(f"sqlite:///{tmp_path}/store.db") as store:
        conversation = await Conversation.create(engine, store=store)
        server.faults.set("cut_after_events=5", times=1)
        with pytest.raises(EngineError):
            await conversation.stream("Write 60 words.").finish()
        async with conversation.stream("Write 60 words.") as stream:
            await read_until(stream)
        rows = await conversation.responses()
    assert [row.status for row in rows] == ["cut", "cancelled"]
    assert all(row.provider_response_id.startswith("resp_") for row in rows)


CALLS: list[Callable[[Engine], Any]] = [
    lambda engine: engine.run(Turn([user("Hi")])),
    lambda engine: Chat(engine).chat_with_state(None, user("Hi")),
]


@pytest.mark.parametrize("call", CALLS)
async def test_a_cancelled_call_has_a_record(
    call: Callable[[Engine], Any], server: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A call without a context manager is closed, too, when it is cancelled."""
    caplog.set_level(logging.INFO, "kedge")
    server.faults.set("slow_first_byte=30", times=1)
    async with open_engine(server) as engine, anyio.create_task_group() as group:
        group.start_soon(call, engine)
        await wait_until_async(lambda: list_posts(server))
        group.cancel_scope.cancel()
    assert [each["status"] for each in read_requests(caplog)] == ["cancelled"]


async def test_a_run_whose_cleanup_is_cancelled_has_a_record(
    server: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A middleware may wait while it is closed, which ends with an error in a cancelled scope."""

    class Waiting(BaseMiddleware):
        async def events(self, turn: Turn, request: Request) -> Events:
            try:
                async for event in self.inner.events(turn, request):
                    yield event
            finally:
                await checkpoint()

    caplog.set_level(logging.INFO, "kedge")
    async with open_engine(server) as engine:
        stream = with_middleware(engine, Waiting).stream(Turn([user("Hi")]))
        with anyio.CancelScope() as scope:
            async with stream:
                async for event in stream:
                    if isinstance(event, ResponseStarted):
                        scope.cancel()
                        await checkpoint()
    assert [each.status for each in stream.log.records] == ["cancelled"]
    assert [each["status"] for each in read_requests(caplog)] == ["cancelled"]


@pytest.mark.parametrize("is_left", [False, True])
async def test_a_polled_answer_has_the_sizes_of_its_request(
    is_left: bool, server: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a store, the record of the request is in the Turn that ``poll`` gets, also as JSON."""
    caplog.set_level(logging.INFO, "kedge")
    async with open_engine(server) as engine:
        turn = await engine.run(Turn([user("My name is Ada.")]))
        caplog.clear()
        async with engine.stream(turn.append(user("Say: Hello.")), background=True) as sent:
            async for event in sent:
                if is_left and isinstance(event, ResponseStarted):
                    break
        if not is_left:
            sent = engine.stream(turn.append(user("Say: Bye.")), background=True, streaming=False)
            await sent.finish()
            caplog.clear()
        async with engine.stream(loads(dumps(sent.reached))) as stream:
            await stream.finish()
    (logged,) = read_requests(caplog)
    (record,) = stream.log.records
    assert logged["sent_bytes"] == record.sent_bytes == len(list_posts(server)[-1].raw)
    assert logged["anchor"] == record.anchor == list_posts(server)[-1].body["previous_response_id"]
    assert (logged["sent_blocks"], logged["full_blocks"]) == (1, 3)
    assert stream.reply.requests == (record,)
    assert find_running(stream.turn) is None
    assert '"request"' not in dumps(stream.turn)


async def test_unknown_sizes_are_not_in_the_log(
    server: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    """If a Turn has no record of the request that it waits for, its log record claims no size."""
    caplog.set_level(logging.INFO, "kedge")
    async with open_engine(server) as engine:
        turn = await engine.run(Turn([user("Say: Hello.")]), background=True)
        caplog.clear()
        running = find_running(turn)
        assert running is not None
        await engine.poll(
            set_state(turn, get_state(turn).with_anchor(replace(running, request="")))
        )
    ends = [each for each in caplog.records if each.getMessage().startswith("request completed")]
    (fields,) = [dict(get_fields(each)) for each in ends]
    assert not fields.keys() & {"sent_bytes", "full_bytes", "sent_blocks", "full_blocks", "reason"}
    assert fields["status"] == "completed"
    assert fields["output_tokens"] > 0
    assert "bytes" not in ends[0].getMessage()


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.mark.parametrize("provider", ["responses", "chat"])
async def test_a_dry_run_has_the_sizes_of_the_request(server: TestServer, provider: str) -> None:
    """The plan of a message that was not sent has the size of the body that is sent then."""
    async with connect(f"{provider}:{server.base_url}#practice", max_retries=0) as engine:
        turn = Turn([system("Be brief.")])
        for text in ("My name is Ada.", "What is my name?", "Once more, please."):
            turn = turn.append(user(text))
            plan = engine.plan(turn, tools=[add], temperature=0.5)
            async with engine.stream(turn, tools=[add], temperature=0.5, streaming=False) as run:
                events = [event async for event in run]
            turn = run.turn
            [sent] = [event for event in events if isinstance(event, RequestSent)]
            assert plan.sizes == (sent.body_bytes, sent.full_bytes)
            assert run.plan is not None
            assert run.plan.sizes == plan.sizes
            assert format_size(sent.body_bytes) in plan.explain()


async def test_only_the_repeated_request_has_the_reason_of_healing(server: TestServer) -> None:
    """The rejected request and a later one of the same run do not have it."""
    async with open_engine(server) as engine:
        turn = await engine.run(Turn([user("Hi")]))
        server.forget()
        async with engine.stream(turn.append(user("Call add with 2 and 3")), tools=[add]) as stream:
            await stream.finish()
    found = [(each.status, each.healed) for each in stream.log.records]
    assert found == [("refused", ""), ("completed", "gone"), ("completed", "")]
