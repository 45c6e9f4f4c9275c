"""One record of each request: in the log, in the reply and in the store, with the sizes of its body."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from engines.conftest import open_engine
from engines.runs import collect_events, read_until
from kedge import Chat, Conversation, open_store
from kedge.engines import Engine
from kedge.engines.transport import encode_body
from kedge.errors import EngineError
from kedge.events import ResponseStarted
from kedge.events.run import RequestPlanned, RequestSent
from kedge.observe import reset, snapshot
from kedge.observe.logs import get_fields
from kedge.planning import find_running, get_state, render, set_state
from kedge.providers import connect
from kedge.testing import TestServer
from kedge.text.display import format_size
from kedge.turns import ReasoningBlock, Turn, dumps, loads, system, tool_call, user
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


LINES = ("My name is Ada.", 'Größe: 5 µm - "quoted"\n\ttab \U0001f600', "Think about 6 * 7")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def send(engine: Any, turn: Turn, **options: Any) -> tuple[Turn, list[tuple[Any, ...]]]:
    """Send a Turn; return it with the answer, and for each request its plan, its sizes and its body."""
    bodies: list[bytes] = []
    options["tap"] = lambda request, _reply, _status: bodies.append(request)
    finished, events = await collect_events(engine, turn, **options)
    plans = [event.plan for event in events if isinstance(event, RequestPlanned)]
    sizes = [event for event in events if isinstance(event, RequestSent)]
    return finished, list(zip(plans, sizes, bodies, strict=True))


def encode_full(body: bytes, plan: Any) -> bytes:
    """Return the body of a request with the complete conversation instead of an anchor."""
    members = json.loads(body)
    members.pop("previous_response_id", None)
    members["input"] = render(plan.source, scope=plan.scope)
    return encode_body(members)


@pytest.mark.parametrize("settings", [{}, {"store": True, "reasoning": {"effort": "high"}}])
async def test_sizes_are_those_of_the_encoder(server: TestServer, settings: dict[str, Any]) -> None:
    """Every chained request reports its body and the body that would send everything, to the byte."""
    turn, seen = Turn([system("Be brief.")]), 0
    reset()
    async with open_engine(server, params=settings) as engine:
        for line in (*LINES, "Please add 2 and 3", "And now?"):
            turn, requests = await send(engine, turn.append(user(line)), tools=[add])
            for plan, sizes, body in requests:
                assert sizes.body_bytes == len(body)
                assert sizes.full_bytes == len(encode_full(body, plan))
                seen += bool(plan.anchor)
    assert seen >= 5
    assert any(isinstance(block, ReasoningBlock) for block in turn)
    totals = {name: snapshot()[f"responses_bytes_{name}_total"][()][1] for name in ("sent", "full")}
    assert 0 < totals["sent"] < totals["full"]


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


async def test_a_plan_that_cannot_be_sent_has_the_sizes_of_its_blocks() -> None:
    """A plan with problems is explained with about the size of its blocks."""
    async with connect("practice") as engine:
        plan = engine.plan(Turn([user("Add"), tool_call("add", {"a": 1}, call_id="call_1")]))
    assert plan.problems
    assert plan.sizes == (plan.delta_bytes, plan.full_bytes)
    assert ", about " in plan.explain()
