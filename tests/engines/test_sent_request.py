"""Test that the answer of a request in the background is judged and recorded by what was sent, whoever receives it."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace
from starlette.responses import Response

from engines.fake_server import (
    TURN,
    RecordingServer,
    complete_response,
    connect_to,
    json_response,
    message_item,
    open_engine,
    serve_handler,
    sse_response,
)
from engines.memory_server import ORDINARY, Body, FakeClock, MemoryServer
from engines.runs import Link, collect_events, read_until, talk
from for_each import for_each
from kedge.engines import Engine
from kedge.events import Event, ResponseStarted
from kedge.events.request_record import find_request, find_sent_request
from kedge.events.run import Healed, ServerForgot
from kedge.planning import find_running, get_state, set_state
from kedge.planning.anchors import get_conversation_id
from kedge.turns import Turn, dumps, loads, user

TOOL = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers, and explain every step of the addition in a few words. " * 8,
    "parameters": {"type": "object", "properties": {}},
}
WITHOUT_TOOLS: dict[str, Any] = {}
WITH_TOOLS: dict[str, Any] = {"tools": [TOOL]}
WITH_SEARCH: dict[str, Any] = {"tools": [{"type": "web_search"}]}
READERS: dict[str, dict[str, Any]] = {
    "the same options": {},
    "without tools": {"tools": []},
    "with tools": WITH_TOOLS,
    "with web search": WITH_SEARCH,
    "not to be stored": {"store": False},
    "stateless": {"mode": "stateless"},
    "in a conversation object": {"mode": "conversation"},
    "another model": {"model": "other"},
    "as a stream": {"streaming": True},
    "with a stored prompt": {"prompt": {"id": "pmpt_1"}},
    "truncated": {"truncation": "auto"},
}
"""Options of the call that receives the answer."""


@dataclass
class BackgroundServer(MemoryServer):
    """A server that also generates responses in the background, counts tools, and names no previous response."""

    echo: str = "missing"
    finished: dict[str, Body] = field(default_factory=dict[str, Body])
    """The responses in the background, each complete when it is fetched."""
    fetched: int = 0
    _tools: list[Any] = field(default_factory=list[Any])

    def _create(self, body: Body) -> Response:
        self._tools = body.get("tools") or []
        if not body.get("background"):
            return super()._create(body)
        reply = super()._create({**body, "stream": False})
        response = json.loads(bytes(reply.body))
        response.update(background=True, store=body.get("store", True))
        self.finished[response["id"]] = response
        started = {**response, "status": "queued", "output": [], "usage": None}
        if body.get("stream"):
            return sse_response(
                {"type": "response.created", "sequence_number": 0, "response": started}
            )
        return json_response(started)

    def _fetch(self, path: str) -> Response:
        response = self.finished.get(path.rpartition("/")[2])
        if response is None:
            return super()._fetch(path)
        self.fetched += 1
        return json_response(response)

    def _count(self, history: list[Any], items: list[Any], output: list[Any]) -> Any:
        usage = super()._count(history, items, output)
        usage["input_tokens"] += len(json.dumps(self._tools)) // 4
        return usage


async def send_some(engine: Engine, **options: Any) -> Turn:
    """Send ordinary messages, so that the server has shown that it remembers."""
    turn = Turn()
    for number in range(6):
        turn, _ = await talk(engine, turn, ORDINARY.format(number), streaming=False, **options)
    return turn


async def start(engine: Engine, turn: Turn, **options: Any) -> Turn:
    """Request an answer in the background; return the Turn as another process reads it."""
    running = await engine.run(
        turn.append(user(ORDINARY.format("nine"))), background=True, streaming=False, **options
    )
    assert find_running(running) is not None
    return loads(dumps(running))


def list_accusations(events: list[Event]) -> list[Event]:
    """Return the events that say that the server answered without its context."""
    return [event for event in events if isinstance(event, ServerForgot | Healed)]


@for_each("reader", READERS)
@for_each("sent", [WITHOUT_TOOLS, WITH_TOOLS, WITH_SEARCH])
async def test_an_honest_server_is_not_accused_by_another_call(
    reader: str, sent: dict[str, Any]
) -> None:
    """The answer is used, continued, and requested once, whatever the call that receives it would send."""
    server = BackgroundServer()
    async with connect_to(server.handle) as engine:
        turn = await start(engine, await send_some(engine, **WITH_TOOLS), **sent)
        requests = len(server.bodies)
        assert "previous_response_id" in server.bodies[-1] or sent is not WITH_TOOLS
        answered, events = await collect_events(engine, turn, **READERS[reader])
        assert list_accusations(events) == []
        assert len(server.bodies) == requests
        plan = engine.plan(answered.append(user("And then?")), streaming=False, **sent)
        assert plan.mode_reason == ""
        state = get_state(answered)
        assert state.previous_response_id == answered.blocks[-1].response_id
        record = state.anchors[-1]
        assert (record.status, record.stored) == ("completed", True)
        assert (record.counted is None) is (sent is WITH_SEARCH)


@for_each("reader", [each for each in READERS if each != "in a conversation object"])
async def test_a_lost_context_is_reported_whoever_receives_the_answer(reader: str) -> None:
    """The server forgot: its answer is reported and not continued."""
    server = BackgroundServer()
    async with connect_to(server.handle) as engine:
        turn = await send_some(engine, **WITH_TOOLS)
        server.restart()
        running = await start(engine, turn, **WITH_TOOLS)
        assert "previous_response_id" in server.bodies[-1]
        answered, events = await collect_events(engine, running, **READERS[reader])
    assert [type(event) for event in list_accusations(events)] == [ServerForgot]
    assert get_state(answered).anchors[-1].status == "lost"


@for_each("reader", READERS)
async def test_another_process_judges_by_what_was_sent(reader: str) -> None:
    """An engine without the evidence of the first one, with other defaults, records the same anchor."""
    server = BackgroundServer()
    clock = FakeClock()
    options = dict(READERS[reader])
    mode = options.pop("mode", "chained")
    with serve_handler(server.handle) as url:
        async with open_engine("responses", url, clock=clock) as engine:
            turn = await start(engine, await send_some(engine))
            polled = get_state(await engine.poll(turn)).anchors[-1]
        async with open_engine("responses", url, clock=clock, mode=mode) as other:
            answered, events = await collect_events(other, turn, **options)
    assert list_accusations(events) == []
    record = get_state(answered).anchors[-1]
    assert record.counted is not None
    assert replace(record, created_at=0.0, expires_at=None) == replace(
        polled, created_at=0.0, expires_at=None
    )


@pytest.mark.parametrize("reads_with_store", [True, False])
async def test_an_answer_that_was_not_to_be_stored_says_nothing_about_the_server(
    reads_with_store: bool,
) -> None:
    """A response that was requested with ``store=False`` is not continued, and others still are."""
    server = BackgroundServer()
    async with connect_to(server.handle) as engine:
        turn = await start(engine, Turn(), store=False)
        options: dict[str, Any] = {} if reads_with_store else {"store": False}
        answered = await engine.poll(turn, **options)
        plan = engine.plan(answered.append(user("And then?")))
        assert (plan.anchor, plan.mode_reason) == (None, "")
        assert engine.plan(Turn([user("Hello")])).mode_reason == ""
        other = await engine.run(Turn([user("Hello")]), streaming=False)
        assert get_state(other).anchors[-1].stored


async def test_the_tokens_of_an_answer_are_recorded_once() -> None:
    """A call with other tools completes the record of the request, and makes no other."""
    server = BackgroundServer()
    async with connect_to(server.handle) as engine:
        turn = await start(engine, await send_some(engine, **WITH_TOOLS))
        async with engine.stream(turn, **WITH_TOOLS) as stream:
            await stream.finish()
    [response] = server.finished.values()
    assert [each.status for each in stream.reply.requests] == ["completed"]
    assert stream.usage.input_tokens == response["usage"]["input_tokens"]


async def test_a_response_of_another_program_gives_no_evidence() -> None:
    """An id without its request is used, without its token counts."""
    server = BackgroundServer()
    async with connect_to(server.handle) as engine:
        turn = await start(engine, await send_some(engine))
        running = find_running(turn)
        assert running is not None
        foreign = set_state(turn, get_state(turn).with_anchor(replace(running, request="")))
        answered, events = await collect_events(engine, foreign)
        assert list_accusations(events) == []
        record = get_state(answered).anchors[-1]
        assert (record.status, record.counted) == ("completed", None)
        assert (record.depth, record.root_created_at) == (running.depth, running.root_created_at)
        plan = engine.plan(answered.append(user("And then?")))
        assert plan.mode_reason == ""


async def test_a_request_that_does_not_belong_to_its_response_is_ignored() -> None:
    """A Turn whose kept request has another digest is that of another program."""
    async with connect_to(BackgroundServer().handle) as engine:
        turn = await start(engine, Turn())
        other = await start(engine, Turn([user("Something else")]))
        running = find_running(turn)
        foreign = find_running(other)
        assert running is not None
        assert foreign is not None
        assert find_sent_request(turn) is not None
        mixed = replace(running, request=foreign.request)
        assert find_sent_request(set_state(turn, get_state(turn).with_anchor(mixed))) is None


LEFT: dict[str, tuple[dict[str, Any], bool]] = {
    "chained": ({}, True),
    "a stored prompt": ({"prompt": {"id": "pmpt_1"}}, False),
    "not stored": ({"store": False}, False),
    "stateless and stored": ({"mode": "stateless", "store": True}, True),
}
"""Options of a request in the background, and whether a later request may continue its answer."""


async def leave(engine: Engine, turn: Turn, **options: Any) -> Turn:
    """Leave a stream in the background at its start; return the Turn as another process reads it."""
    async with engine.stream(turn, background=True, **options) as stream:
        await read_until(stream, ResponseStarted)
    return loads(dumps(stream.reached))


@for_each("kind", LEFT)
async def test_a_stream_that_is_left_is_recorded_as_one_that_is_not_read(kind: str) -> None:
    """The record of the running response, and of its answer, is the same as without a stream."""
    options, is_continuable = LEFT[kind]
    clock = FakeClock()
    async with connect_to(BackgroundServer().handle, trust="always", clock=clock) as engine:
        question = Turn([user("Hello")])
        left = await leave(engine, question, **options)
        started = loads(
            dumps(await engine.run(question, background=True, streaming=False, **options))
        )
        anchors = [find_running(each) for each in (left, started)]
        for running in anchors:
            assert running is not None
            assert running.stored is is_continuable
        same = {"response_id": "", "created_at": 0.0, "root_created_at": 0.0}
        first, second = [
            replace(each, **same, expires_at=None, request="")  # type: ignore[arg-type]
            for each in anchors
        ]
        assert first == second
        for each in (left, started):
            answered = await engine.poll(each)
            plan = engine.plan(answered.append(user("And then?")))
            assert (plan.anchor is not None) is is_continuable


async def test_a_left_stream_stays_in_its_conversation_object(link: Link) -> None:
    """The answer is fetched into the object to which its question was sent, and the next message follows there."""
    question = Turn([user("Say: Hello there.")])
    left = await leave(link.engine, question, mode="conversation")
    running = find_running(left)
    assert running is not None
    object_id = link.bodies[0]["conversation"]
    assert get_conversation_id(running.scope) == object_id
    answered = await link.engine.poll(left)
    assert get_state(answered).conversation_id == object_id
    turn = await link.send("What did I say first?", turn=answered, mode="conversation")
    assert link.bodies[-1]["conversation"] == object_id
    link.check_law(turn)


async def test_a_stored_prompt_is_sent_to_no_conversation_object() -> None:
    """The request, its record and its anchor agree: it is stateless, and nothing is created for it."""
    server = RecordingServer(json_response(complete_response("resp_1", message_item("Hi."))))
    async with (
        connect_to(server.handle, mode="conversation") as engine,
        engine.stream(TURN, prompt={"id": "pmpt_1"}, streaming=False) as stream,
    ):
        turn = await stream.finish()
    [body] = server.bodies
    assert server.paths == ["/v1/responses"]
    assert "conversation" not in body
    [record] = stream.reply.requests
    assert (record.mode, record.stored) == ("stateless", False)
    assert get_state(turn).conversation_id == ""


async def test_the_record_of_a_running_response_has_its_request() -> None:
    """The request is kept while the response runs, and not after its end."""
    async with connect_to(BackgroundServer().handle) as engine:
        turn = await start(engine, Turn())
        record = find_request(turn)
        assert record is not None
        assert record.sent_request is not None
        async with engine.stream(turn) as stream:
            await stream.finish()
    assert [each.sent_request for each in stream.reply.requests] == [None]
