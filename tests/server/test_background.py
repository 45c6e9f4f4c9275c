"""Responses in the background: polled, cancelled, read again, and honest after a restart."""

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from kedge.server.background import EventLog
from kedge.server.models import Closed, Piece, Prompt
from kedge.server.settings import Limits
from kedge.server.sqlite import Database
from kedge.server.sse import Cut
from kedge.testing import TestServer, serve
from server.conftest import PATIENCE, check_resource
from server.models import Gated

Connect = Callable[[TestServer], OpenAI]
Event = dict[str, Any]


@pytest.fixture
def model() -> Gated:
    """A model that waits for the test."""
    return Gated()


@pytest.fixture
def server(model: Gated) -> Iterator[TestServer]:
    """A server with that model."""
    with serve(model=model) as running:
        yield running


def create(http: httpx2.Client, said: str = "wait", **body: Any) -> Any:
    asked = {"model": "m", "input": said, "background": True, **body}
    return http.post("/v1/responses", json=asked).json()


def status(http: httpx2.Client, known: str) -> str:
    return http.get(f"/v1/responses/{known}").json()["status"]


def until(condition: Callable[[], object]) -> None:
    """Wait for something that the server brings about."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def events_of(lines: Iterator[str]) -> Iterator[Event]:
    """Read the events of a stream as they come."""
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


class Reader:
    """One reader of a stream."""

    def __init__(self, answer: httpx2.Response) -> None:
        self.answer = answer
        self._events = events_of(answer.iter_lines())

    def take(self, number: int) -> list[Event]:
        return [next(self._events) for _ in range(number)]

    def rest(self) -> list[Event]:
        return list(self._events)


def opened(http: httpx2.Client, said: str = "wait", **body: Any) -> Any:
    asked = {"model": "m", "input": said, "background": True, "stream": True, **body}
    return http.stream("POST", "/v1/responses", json=asked)


def resumed(http: httpx2.Client, known: str, **query: Any) -> Any:
    return http.stream("GET", f"/v1/responses/{known}", params={"stream": "true", **query})


def test_a_response_is_queued_written_and_finished(http: httpx2.Client, model: Gated) -> None:
    """Whoever asks is told how far it is."""
    made = check_resource(create(http))
    assert made["status"] == "queued"
    assert made["background"] is True
    assert made["output"] == []
    until(lambda: status(http, made["id"]) == "in_progress")
    model.let_go()
    until(lambda: status(http, made["id"]) == "completed")
    whole = check_resource(http.get(f"/v1/responses/{made['id']}").json())
    assert whole["output"][0]["content"][0]["text"] == "answer to wait"
    assert whole["usage"]["output_tokens"] > 0


def test_only_so_many_run_at_once(model: Gated) -> None:
    """The others are queued until it is their turn; one more than may wait is refused."""
    limits = Limits(background_running=1, background_waiting=1, shutdown_seconds=1)
    with serve(model=model, limits=limits) as server, client_of(server) as http:
        first, second = create(http, "wait 1"), create(http, "wait 2")
        until(lambda: model.begun)
        assert status(http, second["id"]) == "queued"
        refused = create(http, "wait 3")
        assert refused["error"]["code"] == "rate_limit_exceeded"
        model.let_go()
        until(lambda: status(http, second["id"]) == "completed")
        assert status(http, first["id"]) == "completed"
        assert model.begun == ["wait 1", "wait 2"]


def client_of(server: TestServer) -> httpx2.Client:
    return httpx2.Client(base_url=server.url, verify=False, timeout=PATIENCE)


def test_a_stream_outlives_its_reader(http: httpx2.Client, model: Gated) -> None:
    """To leave stops nothing, and what comes after can be read by its number."""
    with opened(http) as answer:
        begun = Reader(answer).take(6)
    assert [event["type"].removeprefix("response.") for event in begun] == [
        "created",
        "queued",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
    ]
    assert [event["response"]["status"] for event in begun[:3]] == [
        "queued",
        "queued",
        "in_progress",
    ]
    known = begun[0]["response"]["id"]
    assert status(http, known) == "in_progress"
    model.let_go()
    with resumed(http, known, starting_after=5) as answer:
        rest = Reader(answer).rest()
    numbers = [event["sequence_number"] for event in [*begun, *rest]]
    assert numbers == list(range(len(numbers)))
    assert rest[-1]["type"] == "response.completed"
    with resumed(http, known) as answer:
        assert Reader(answer).rest() == [*begun, *rest]


def test_several_readers_follow_one_stream(http: httpx2.Client, model: Gated) -> None:
    """Each from its own place, all of them to the end, while it is written."""
    with opened(http) as first:
        one = Reader(first)
        begun = one.take(6)
        known = begun[0]["response"]["id"]
        with resumed(http, known, starting_after=3) as second, resumed(http, known) as third:
            two, three = Reader(second), Reader(third)
            assert two.take(2) == begun[4:]
            assert three.take(6) == begun
            model.let_go()
            ends = [reader.rest() for reader in (one, two, three)]
    assert ends[0] == ends[1] == ends[2]
    assert ends[0][-1]["type"] == "response.completed"


def test_the_official_client_resumes_a_stream(server: TestServer, connect: Connect) -> None:
    """Its retrieve takes the number of the last event that it saw."""
    client = connect(server)
    with client.responses.create(model="m", input="hello", background=True, stream=True) as stream:
        events = list(stream)
    created = events[0]
    assert created.type == "response.created"
    with client.responses.retrieve(created.response.id, stream=True, starting_after=4) as again:
        assert list(again) == events[5:]


def test_after_the_last_event_there_is_nothing(http: httpx2.Client) -> None:
    """An empty stream, with its end."""
    with opened(http, "hello") as answer:
        events = Reader(answer).rest()
    known = events[0]["response"]["id"]
    with resumed(http, known, starting_after=10_000) as answer:
        assert answer.read() == b"data: [DONE]\n\n"


@pytest.mark.parametrize("after", ["x", "-1", "1.5"])
def test_a_place_in_a_stream_is_a_number(http: httpx2.Client, after: str) -> None:
    """Anything else is refused."""
    with opened(http, "hello") as answer:
        known = Reader(answer).rest()[0]["response"]["id"]
    with resumed(http, known, starting_after=after) as answer:
        answer.read()
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "starting_after"


def test_only_a_background_stream_can_be_read_again(http: httpx2.Client) -> None:
    """In the words of the hosted API, and in ours where it was not a stream."""
    plain = http.post("/v1/responses", json={"model": "m", "input": "x"}).json()
    refused = http.get(f"/v1/responses/{plain['id']}?stream=true").json()["error"]
    assert refused["message"] == (
        "This response cannot be streamed because it was not created with background=true."
    )
    unwatched = create(http, "hello")
    refused = http.get(f"/v1/responses/{unwatched['id']}?stream=true").json()["error"]
    assert refused["code"] == "stream_not_kept"


def test_events_are_kept_for_a_while_only(server: TestServer, http: httpx2.Client) -> None:
    """The response itself stays."""
    with opened(http, "hello") as answer:
        known = Reader(answer).rest()[0]["response"]["id"]
    server.clock.advance(seconds=301)
    refused = http.get(f"/v1/responses/{known}?stream=true")
    assert refused.json()["error"]["code"] == "stream_not_kept"
    assert status(http, known) == "completed"


def test_finished_streams_make_room_for_those_that_run(model: Gated) -> None:
    """The response of one that was dropped is there as ever."""
    limits = Limits(stream_bytes=10_000, shutdown_seconds=1)
    with serve(model=model, limits=limits) as server, client_of(server) as http:
        ids: list[str] = []
        for _ in range(3):
            with opened(http, "hello") as answer:
                ids.append(Reader(answer).rest()[0]["response"]["id"])
        kept = [http.get(f"/v1/responses/{known}?stream=true").status_code for known in ids]
        assert kept == [400, 400, 200]
        assert [status(http, known) for known in ids] == ["completed"] * 3


async def test_a_stream_that_is_too_long_loses_its_beginning() -> None:
    """Whoever has read it goes on; whoever has not is cut off, and told when asking anew."""
    log = EventLog()
    log.add([{"type": "a"}, {"type": "b"}])
    quick, slow = log.read(-1), log.read(-1)
    assert b'"a"' in await anext(quick)
    log.add([{"type": "c"}])
    assert log.drop_oldest()
    assert log.drop_oldest()
    assert not log.drop_oldest()
    assert not log.holds(0)
    assert log.holds(1)
    log.end(0.0)
    assert b'"sequence_number":2' in await anext(quick)
    assert [frames async for frames in quick] == []
    with pytest.raises(Cut):
        await anext(slow)


def test_cancelling_stops_the_work_and_can_be_repeated(
    http: httpx2.Client, model: Gated, server: TestServer
) -> None:
    """The response is cancelled, without output, and stays so."""
    made = create(http)
    until(lambda: model.begun)
    cancelled = http.post(f"/v1/responses/{made['id']}/cancel")
    assert cancelled.status_code == 200
    assert cancelled.json()["status"] == "cancelled"
    assert cancelled.json()["output"] == []
    until(lambda: model.stopped == ["wait"])
    again = http.post(f"/v1/responses/{made['id']}/cancel")
    assert again.json() == cancelled.json() == http.get(f"/v1/responses/{made['id']}").json()
    assert server.running == 0


def test_readers_of_a_cancelled_stream_are_told(http: httpx2.Client, model: Gated) -> None:
    """The stream ends with a failure whose response is cancelled."""
    with opened(http) as answer:
        reader = Reader(answer)
        known = reader.take(6)[0]["response"]["id"]
        http.post(f"/v1/responses/{known}/cancel")
        last = reader.rest()[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "cancelled"
    assert last["response"]["error"] is None


def test_what_waits_for_its_turn_can_be_cancelled(model: Gated) -> None:
    """It never begins, and those behind it move up."""
    limits = Limits(background_running=1, shutdown_seconds=1)
    with serve(model=model, limits=limits) as server, client_of(server) as http:
        create(http, "wait 1")
        until(lambda: model.begun)
        with opened(http, "two") as answer:
            reader = Reader(answer)
            known = reader.take(2)[0]["response"]["id"]
            assert http.post(f"/v1/responses/{known}/cancel").json()["status"] == "cancelled"
            assert [event["type"] for event in reader.rest()] == ["response.failed"]
        third = create(http, "three")
        model.let_go()
        until(lambda: status(http, third["id"]) == "completed")
        assert model.begun == ["wait 1", "three"]


@pytest.mark.parametrize(
    ("background", "message"),
    [
        (True, "Cannot cancel a completed response."),
        (False, "Cannot cancel a synchronous response."),
    ],
)
def test_what_cannot_be_cancelled_is_refused(
    http: httpx2.Client, background: bool, message: str
) -> None:
    """Because it has finished, or because its client waits for it."""
    made = create(http, "hello", background=background)
    until(lambda: status(http, made["id"]) == "completed")
    refused = http.post(f"/v1/responses/{made['id']}/cancel")
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == message


def test_an_unknown_response_cannot_be_cancelled(http: httpx2.Client) -> None:
    """It is not found."""
    assert http.post("/v1/responses/resp_x/cancel").status_code == 404


def test_what_is_not_finished_can_neither_be_continued_nor_deleted(
    http: httpx2.Client, model: Gated
) -> None:
    """The errors say what to do; afterwards both can be done."""
    made = create(http)
    until(lambda: status(http, made["id"]) == "in_progress")
    refused = create(http, "x", background=False, previous_response_id=made["id"])
    assert refused["error"]["code"] == "previous_response_not_completed"
    assert "is in_progress" in refused["error"]["message"]
    deleted = http.delete(f"/v1/responses/{made['id']}")
    assert deleted.json()["error"]["message"] == "Cannot delete an in-flight response."
    model.let_go()
    until(lambda: status(http, made["id"]) == "completed")
    went_on = create(http, "x", background=False, previous_response_id=made["id"])
    assert went_on["status"] == "completed"
    assert http.delete(f"/v1/responses/{made['id']}").status_code == 200


def test_a_conversation_waits_for_its_background_response(
    http: httpx2.Client, model: Gated
) -> None:
    """Nobody else may speak in it meanwhile, and it moves on at the end."""
    conversation = http.post("/v1/conversations", json={}).json()["id"]
    made = create(http, conversation=conversation)
    refused = create(http, "x", conversation=conversation)
    assert refused["error"]["code"] == "conversation_locked"
    until(lambda: model.begun)
    model.let_go()
    until(lambda: status(http, made["id"]) == "completed")
    items = http.get(f"/v1/conversations/{conversation}/items").json()["data"]
    assert len(items) == 2


@pytest.mark.parametrize("retention", [True, False])
def test_the_background_needs_a_store(retention: bool) -> None:
    """What is not kept could never be asked for."""
    with serve(zero_data_retention=not retention) as server, client_of(server) as http:
        body = {"model": "m", "input": "x", "background": True, "store": not retention}
        refused = http.post("/v1/responses", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "background"


def test_a_model_that_fails_fails_the_response() -> None:
    """The reader is told, and so is whoever asks later."""

    class Broken(Gated):
        async def answer(self, prompt: Prompt) -> AsyncIterator[Piece]:
            raise RuntimeError("broken")
            yield Closed()

    with serve(model=Broken()) as broken, client_of(broken) as http:
        with opened(http) as answer:
            events = Reader(answer).rest()
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        whole = http.get(f"/v1/responses/{events[0]['response']['id']}").json()
    assert whole["status"] == "failed"
    assert whole["error"]["code"] == "server_error"


def test_a_stop_fails_what_runs_and_says_why(model: Gated, tmp_path: Path) -> None:
    """After the time to finish, running and waiting responses are failed; the next start knows."""
    db = str(tmp_path / "server.db")
    limits = Limits(background_running=1, shutdown_seconds=0)
    with serve(model=model, db=db, limits=limits) as server, client_of(server) as http:
        ids = [create(http, f"wait {number}")["id"] for number in range(2)]
        until(lambda: model.begun)
    with serve(db=db) as server, client_of(server) as http:
        for known in ids:
            found = http.get(f"/v1/responses/{known}").json()
            assert found["status"] == "failed"
            assert found["error"]["message"] == (
                "The server was stopped before this response was finished."
            )


def test_a_crash_fails_what_was_left(model: Gated, tmp_path: Path) -> None:
    """A restart marks what was running or waiting; nothing is taken up again."""
    db = str(tmp_path / "server.db")
    with serve(model=model, db=db) as server, client_of(server) as http:
        made = create(http, "hello")
        until(lambda: status(http, made["id"]) == "completed")
    database = Database(db)
    for left, number in (("queued", 1), ("in_progress", 2)):
        database.run(
            "INSERT INTO nodes SELECT id + ?, replace(key, '0000000001', ?), parent, barrier, "
            "tokens, ?, expires_at, conversation, input, output, "
            "CAST(replace(asked, '0000000001', ?) AS BLOB), "
            "CAST(replace(became, 'completed\"', ?) AS BLOB) FROM nodes WHERE id = 1",
            (number, f"000000000{number + 1}", left, f"000000000{number + 1}", f'{left}"'),
        )
    database._connection.close()  # without saying goodbye
    with serve(db=db) as server, client_of(server) as http:
        for number in (2, 3):
            known = made["id"].replace("0000000001", f"000000000{number}")
            found = http.get(f"/v1/responses/{known}").json()
            assert found["status"] == "failed"
            assert found["error"]["message"] == (
                "The server was restarted before this response was finished."
            )
            assert http.post(f"/v1/responses/{known}/cancel").status_code == 400
