"""Test responses that a server generates in the background: they are waited for, and never paid for twice."""

from collections.abc import AsyncIterator
from time import time as current_time
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from engines.fake_server import connect_to, json_response, message_item, sse_response
from engines.runs import Link, last_text, request_bodies
from fake_time import FakeTime
from kedge import Chat
from kedge.compaction import (
    CompactionRequest,
    CompactionResult,
    Compactor,
    MessageLimitCompactor,
)
from kedge.compaction.base import unchanged_result
from kedge.engines import Engine, ResponsesEngine
from kedge.errors import EngineError, InvalidTurn, RequestRefused, ServerFailed
from kedge.events import TextDelta
from kedge.evidence.server_evidence import Trust
from kedge.middleware import compact, with_middleware
from kedge.planning import find_running, get_state
from kedge.providers import connect
from kedge.testing import TestServer
from kedge.turns import Turn, assistant, dumps, loads, user

TURN = Turn([user("Say: Hello there.")])


def count_requests(server: TestServer) -> int:
    """Return how many responses were requested."""
    sent = [(each.method, each.path) for each in server.requests]
    return sent.count(("POST", "/v1/responses"))


async def test_a_queued_response_is_an_outcome_of_its_own(link: Link) -> None:
    """The run ends without an answer, and the Turn has the id of the response."""
    async with link.engine.stream(TURN, background=True, streaming=False) as stream:
        turn = await stream.finish()
    assert stream.answers[-1].outcome.status == "running"
    assert find_running(turn) is not None
    assert turn.blocks == TURN.blocks


async def test_an_answer_in_the_background_is_polled(link: Link) -> None:
    """Polling appends the answer, after which nothing is running, and sends no second request."""
    turn = await link.engine.poll(await link.engine.run(TURN, background=True, streaming=False))
    assert last_text(turn) == "Hello there."
    assert find_running(turn) is None
    assert count_requests(link.server) == 1


async def test_a_polled_answer_is_an_anchor(link: Link) -> None:
    """The next request continues the response that was polled."""
    turn = await link.engine.run(TURN, background=True, streaming=False)
    running = find_running(turn)
    assert running is not None
    turn = await link.engine.poll(turn)
    assert turn.blocks[-1].response_id == running.response_id
    assert get_state(turn).previous_response_id == running.response_id
    await link.send("And now?", turn=turn)
    assert link.bodies[-1]["previous_response_id"] == running.response_id


async def test_a_stored_turn_keeps_the_id_of_an_answer_that_is_issued_once(link: Link) -> None:
    """A Turn may be waited for several times, also from its JSON form; each of its answers is an anchor."""
    turn = loads(dumps(await link.engine.run(TURN, background=True)))
    async with link.engine.stream(turn) as stream:
        deltas = [event.delta async for event in stream if isinstance(event, TextDelta)]
    assert "".join(deltas) == "Hello there."
    for answered in (stream.turn, await link.engine.poll(turn), await link.engine.run(turn)):
        assert last_text(answered) == "Hello there."
        plan = link.engine.plan(answered.append(user("And now?")))
        assert plan.previous_response_id == answered.blocks[-1].response_id
    assert count_requests(link.server) == 1


async def test_ids_that_are_issued_twice_in_the_background_are_not_relied_on(link: Link) -> None:
    """A server that issues an id twice is not chained on, also before an answer was fetched."""
    link.server.faults.set("reuse_response_id")
    for _ in range(2):
        assert find_running(await link.engine.run(TURN, background=True))
    assert link.engine.plan(Turn([user("And now?")])).mode_reason == "reused_ids"


@pytest.mark.parametrize("trust", ["never", "earned"])
async def test_a_response_in_the_background_is_stored_also_if_everything_is_sent(
    server: TestServer, trust: Trust
) -> None:
    """A server that is not relied on stores an answer that must be fetched later, and no other."""
    async with connect(f"responses:{server.base_url}#practice", trust=trust) as engine:
        server.faults.set("reuse_response_id", times=3)
        for _ in range(3):
            await engine.run(TURN)
        turn = await engine.run(TURN, background=True)
        assert last_text(await engine.poll(turn)) == "Hello there."
        *_, stateless, background = request_bodies(server)
        assert (stateless["store"], background.get("store", True)) == (False, True)
        with pytest.raises(RequestRefused, match="must be stored"):
            await engine.run(TURN, background=True, mode="stateless")


async def test_a_background_stream_continues_after_the_last_event(link: Link) -> None:
    """A stream whose connection ends is continued with ``starting_after``, without repeated text; a tap gets all."""
    replies: list[tuple[bytes, int | None]] = []
    link.server.faults.set("cut_after_events=5", times=1)
    async with link.engine.stream(
        Turn([user("Say: One two three four.")]),
        background=True,
        tap=lambda _, reply, status: replies.append((reply, status)),
    ) as stream:
        deltas = [event.delta async for event in stream if isinstance(event, TextDelta)]
    [(reply, status)] = replies
    assert status == 200
    assert all(each in reply for each in (b'"response.created"', b'"response.completed"'))
    assert "".join(deltas) == last_text(stream.turn) == "One two three four."
    fetched = [each.path for each in link.server.requests if each.method == "GET"]
    assert fetched == [f"/v1/responses/{stream.turn.blocks[-1].response_id}"]
    assert count_requests(link.server) == 1


async def test_a_background_stream_that_makes_progress_is_continued_without_a_limit() -> None:
    """Each connection may end after one event."""
    response = {"id": "resp_1", "status": "in_progress", "background": True}
    delta = {"type": "response.output_text.delta", "item_id": "m", "output_index": 0}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": response},
        *({**delta, "delta": each} for each in "anchor"),
        {"type": "response.completed", "response": {**response, "status": "completed"}},
    ]

    async def answer(request: Request) -> Response:
        await request.body()
        number = int(request.query_params.get("starting_after", "-1")) + 1
        return sse_response({**events[number], "sequence_number": number})

    async with connect_to(answer) as engine, engine.stream(TURN, background=True) as stream:
        assert last_text(await stream.finish()) == "anchor"


async def test_a_background_stream_that_cannot_be_continued_keeps_its_id() -> None:
    """If the rest of a stream cannot be fetched, the Turn has the id, and nothing is lost."""
    started = {"id": "resp_1", "status": "in_progress", "background": True, "output": []}

    async def answer(request: Request) -> Response:
        await request.body()
        if request.method == "GET":
            return json_response({"error": {"message": "Try later."}}, 503)
        event = {"type": "response.created", "sequence_number": 0, "response": started}
        return sse_response(event)

    async with connect_to(answer) as engine, engine.stream(TURN, background=True) as stream:
        turn = await stream.finish()
    running = find_running(turn)
    assert running is not None
    assert running.response_id == "resp_1"


async def test_a_response_in_the_background_can_be_cancelled(link: Link) -> None:
    """The server stops it, and the Turn can be sent again."""
    slow = Turn([user("Write 5000 words, very slowly")])
    turn = await link.engine.cancel(await link.engine.run(slow, background=True))
    assert find_running(turn) is None
    with pytest.raises(InvalidTurn, match="send it with run"):
        await link.engine.poll(turn)
    assert link.server.running == 0


async def test_a_finished_response_cannot_be_cancelled_and_is_returned() -> None:
    """A response that was complete before it could be stopped is the answer."""
    async with connect_to(FakeBackground("completed").handle) as engine:
        turn = await engine.cancel(await engine.run(TURN, background=True))
    assert turn.blocks[-1] == assistant("Done.")


class FakeBackground:
    """A server whose response ends as a test defines."""

    def __init__(
        self, status: str, code: int = 200, *, message: str = "Not found.", missing: int = 0
    ) -> None:
        self.status = status
        self.code = code
        self.message = message
        self.missing = missing
        """How many requests for the response are answered 404 before the others."""
        self.posts = 0
        self.fetches = 0

    async def handle(self, request: Request) -> Response:
        """Return a queued response, and then the final one."""
        is_new = request.method == "POST" and request.url.path.endswith("/responses")
        self.posts += is_new
        message = {"type": "message", "id": "m", "role": "assistant", "content": "Done."}
        response: dict[str, Any] = {"id": "resp_1", "background": True, "output": []}
        if is_new:
            return json_response({**response, "status": "queued"})
        self.fetches += 1
        if self.fetches <= self.missing:
            return json_response({"error": {"message": self.message}}, 404)
        if self.code != 200:
            return json_response({"error": {"message": self.message}}, self.code)
        return json_response({**response, "status": self.status, "output": [message]})


NAMED = "Response with id 'resp_1' not found."
LONGER_NAME = "Response with id 'resp_12' not found."
PATH = "Cannot GET /v1/responses/resp_1"


@pytest.fixture
def time() -> FakeTime:
    """Return a time that passes only while something waits."""
    return FakeTime()


@pytest.fixture
def background_server() -> FakeBackground:
    """Return a server whose response in the background is complete when it is fetched."""
    return FakeBackground("completed")


@pytest.mark.parametrize(
    ("options", "is_anchor"), [({}, True), ({"prompt": {"id": "pmpt_1"}}, False)]
)
async def test_an_answer_to_a_stored_prompt_is_no_anchor_also_if_it_is_fetched(
    options: Any, is_anchor: bool
) -> None:
    """The context of a request in the background is that of its start: ``poll`` does not repeat its parameters."""
    async with connect_to(FakeBackground("completed").handle, trust="always") as engine:
        turn = await engine.poll(await engine.run(TURN, background=True, **options))
        assert (engine.plan(turn.append(user("And now?"))).anchor is not None) is is_anchor


@pytest.mark.parametrize(
    ("status", "code", "message", "kind", "match", "is_running"),
    [
        ("failed", 200, "", ServerFailed, None, False),
        ("completed", 404, NAMED, RequestRefused, r"no longer has resp_1.*send the Turn", False),
        ("completed", 410, NAMED, RequestRefused, r"no longer has resp_1.*send the Turn", False),
        ("completed", 404, "Not found.", RequestRefused, r"not known.*resp_1.*cancel", True),
        ("completed", 404, LONGER_NAME, RequestRefused, r"not known.*resp_1.*cancel", True),
        ("completed", 404, PATH, RequestRefused, r"not known.*resp_1.*cancel", True),
        ("completed", 503, "Busy.", ServerFailed, None, True),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
async def test_a_failed_poll_requests_no_other_answer(
    status: str,
    code: int,
    message: str,
    kind: type[EngineError],
    match: str | None,
    is_running: bool,
    streaming: bool,
) -> None:
    """The Turn of the error can be sent again only if the response failed, or the server names it as missing."""
    server = FakeBackground(status, code, message=message)
    time = FakeTime()
    async with connect_to(server.handle, clock=time.clock, sleep=time.sleep) as engine:
        queued = await engine.run(TURN, background=True)
        with pytest.raises(kind, match=match) as caught:
            await engine.poll(queued, streaming=streaming)
        turn = caught.value.turn
        assert turn is not None
        assert (find_running(turn) is not None) is is_running
        if is_running:
            server.code = 200
            assert (await engine.poll(turn)).blocks[-1] == assistant("Done.")
    assert server.posts == 1


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("message", ["Not found.", NAMED])
async def test_a_young_response_that_is_not_found_is_fetched_again(
    message: str, streaming: bool
) -> None:
    """For a minute another replica, or a gateway, may not have it yet: the pauses become longer."""
    server = FakeBackground("completed", message=message, missing=4)
    time = FakeTime()
    async with connect_to(server.handle, clock=time.clock, sleep=time.sleep) as engine:
        queued = await engine.run(TURN, background=True)
        turn = await engine.poll(loads(dumps(queued)), streaming=streaming)
    assert turn.blocks[-1] == assistant("Done.")
    assert time.pauses == [1, 2, 4, 8]
    assert server.posts == 1


async def test_a_response_is_young_for_a_minute(
    background_server: FakeBackground, time: FakeTime
) -> None:
    """The pauses end with the minute; for an older response there are none."""
    background_server.code = 404
    handle = background_server.handle
    async with connect_to(handle, clock=time.clock, sleep=time.sleep) as engine:
        turn = await engine.run(TURN, background=True)
        for pauses in ([1, 2, 4, 8, 16, 29], []):
            time.pauses.clear()
            with pytest.raises(RequestRefused) as caught:
                await engine.poll(turn)
            assert time.pauses == pauses
            assert caught.value.turn is not None
            turn = caught.value.turn
            running = find_running(turn)
            assert running is not None
            assert running.status == "unknown"


async def test_an_unknown_response_can_be_given_up(
    background_server: FakeBackground, time: FakeTime
) -> None:
    """After ``cancel`` the Turn is sent again, also if the server answers that there is nothing to cancel."""
    background_server.code = 404
    handle = background_server.handle
    async with connect_to(handle, clock=time.clock, sleep=time.sleep) as engine:
        with pytest.raises(RequestRefused) as caught:
            await engine.poll(await engine.run(TURN, background=True))
        assert caught.value.turn is not None
        turn = await engine.cancel(loads(dumps(caught.value.turn)))
        assert find_running(turn) is None
        await engine.run(turn, background=True)
    assert background_server.posts == 2


async def test_an_unknown_response_is_fetched_when_the_server_has_it_again(
    background_server: FakeBackground, time: FakeTime
) -> None:
    """A Turn of which the response was unknown gets its answer, which is an anchor."""
    background_server.code = 404
    handle = background_server.handle
    settings = {"clock": time.clock, "sleep": time.sleep, "trust": "always"}
    async with connect_to(handle, **settings) as engine:
        with pytest.raises(RequestRefused) as caught:
            await engine.poll(await engine.run(TURN, background=True))
        assert caught.value.turn is not None
        background_server.code = 200
        turn = await engine.poll(caught.value.turn)
        assert engine.plan(turn.append(user("And now?"))).anchor_id == "resp_1"
    assert background_server.posts == 1


async def test_a_chat_waits_for_an_unknown_response(
    background_server: FakeBackground, time: FakeTime
) -> None:
    """The state of a chat names the response also after a poll that did not find it."""
    background_server.code = 404
    handle = background_server.handle
    async with connect_to(handle, clock=time.clock, sleep=time.sleep) as engine:
        chat = Chat(engine)
        queued = await chat.chat_with_state(None, "Say: Done.", background=True)
        with pytest.raises(RequestRefused, match="not known"):
            await chat.chat_with_state(queued.state)
        background_server.code = 200
        answer = await chat.chat_with_state(queued.state)
    assert answer.text == "Done."
    assert background_server.posts == 1


async def test_a_background_stream_is_continued_on_a_server_that_has_it_later(
    time: FakeTime,
) -> None:
    """A stream whose connection ends early is continued although another replica does not know it yet."""
    started = {"id": "resp_1", "status": "in_progress", "background": True, "output": []}
    finished = {**started, "status": "completed", "output": [message_item("Done.")]}
    continuations = 0

    async def answer(request: Request) -> Response:
        nonlocal continuations
        await request.body()
        if request.method == "POST":
            return sse_response(
                {"type": "response.created", "sequence_number": 0, "response": started}
            )
        continuations += 1
        if continuations == 1:
            return json_response({"error": {"message": NAMED}}, 404)
        return sse_response(
            {"type": "response.completed", "sequence_number": 1, "response": finished}
        )

    async with (
        connect_to(answer, clock=time.clock, sleep=time.sleep) as engine,
        engine.stream(TURN, background=True) as stream,
    ):
        assert last_text(await stream.finish()) == "Done."
    assert 1 in time.pauses


async def test_typed_output_waits_for_the_background(engine: ResponsesEngine) -> None:
    """A typed answer in the background has no value yet, and is not requested again."""

    class City(BaseModel):
        name: str

    reply = await engine.ask(Turn([user("A city")]), output=City, background=True)
    assert reply.output is None
    assert reply.response_id
    finished = await engine.ask(reply.turn, output=City)
    assert isinstance(finished.output, City)


async def test_the_state_of_a_chat_keeps_the_id(link: Link) -> None:
    """A chat continues with the answer when it is called with the state; only the answer is compacted."""
    compacted: list[int] = []

    class Recorder(Compactor):
        async def compact(self, request: CompactionRequest) -> CompactionResult:
            compacted.append(len(request.blocks))
            return unchanged_result(request, "recorder")

    chat = Chat(link.engine, compactor=Recorder())
    queued = await chat.chat_with_state(None, "Say: Hello there.", background=True)
    assert queued.text == ""
    assert queued.response_id
    answer = await Chat(link.engine, compactor=Recorder()).chat_with_state(queued.state)
    assert compacted == [2]
    assert (answer.text, answer.response_id) == ("Hello there.", queued.response_id)
    assert count_requests(link.server) == 1


def clock_after_expiry() -> float:
    """Return a time at which the responses of today have expired."""
    return current_time() + 40 * 86_400


FULL_SENDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "doubt": ({"trust": "never"}, {}),
    "expired": ({"clock": clock_after_expiry}, {}),
    "stateless": ({}, {"mode": "stateless"}),
    "conversation": ({}, {"mode": "conversation"}),
    "prompt": ({}, {"prompt": {"id": "pmpt_1"}}),
}
"""Settings of an engine, and options of a call, with which a Turn would be sent in full."""


@pytest.fixture(params=FULL_SENDS)
async def full_sender(
    request: pytest.FixtureRequest, server: TestServer
) -> AsyncIterator[tuple[Engine, dict[str, Any]]]:
    """Yield an engine, and options, with which another process would send a Turn in full."""
    settings, options = FULL_SENDS[request.param]
    async with connect(f"responses:{server.base_url}#practice", **settings) as engine:
        yield engine, options


@pytest.mark.parametrize("streaming", [False, True])
async def test_nothing_is_compacted_while_the_answer_is_generated(
    link: Link, full_sender: tuple[Engine, dict[str, Any]], streaming: bool
) -> None:
    """The answer is paid for, also where a request would send too much, or to a new conversation object."""
    queued = await link.send("One.", "Two.", "Three.")
    queued = await link.engine.run(queued.append(user("Say: Ahoy!")), background=True)
    engine, options = full_sender
    stack = with_middleware(engine, compact(MessageLimitCompactor(1_000, 2), resend_limit=1))
    before = [each for each in link.server.requests if each.method == "POST"]
    turn = await stack.poll(queued, streaming=streaming, **options)
    assert turn.blocks[:-1] == queued.blocks
    assert last_text(turn) == "Ahoy!"
    assert [each for each in link.server.requests if each.method == "POST"] == before


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_chat_compacts_nothing_while_the_answer_is_generated(
    link: Link, full_sender: tuple[Engine, dict[str, Any]], streaming: bool
) -> None:
    """Neither the next call nor ``compact_pending`` changes the conversation that the answer belongs to."""
    chat = Chat(link.engine)
    state = None
    for line in ("One.", "Two.", "Three."):
        state = (await chat.chat_with_state(state, line)).state
    queued = await chat.chat_with_state(state, "Say: Ahoy!", background=True)
    engine, options = full_sender
    other = Chat(engine, compactor=MessageLimitCompactor(1_000, 2), resend_limit=1)
    pending = Chat(engine, compactor=MessageLimitCompactor(2))
    assert await pending.compact_pending(queued.state) == queued.state
    answer = await other.chat_with_state(queued.state, streaming=streaming, **options)
    assert answer.text == "Ahoy!"
    assert answer.compactions == ()
    assert count_requests(link.server) == 4
