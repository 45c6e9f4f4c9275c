"""Background responses: polling, cancellation, resumed streams and restarts."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import httpx2
import pytest

from for_each import for_each
from kedge.server.background import BackgroundJobs, EventLog
from kedge.server.settings import Limits
from kedge.server.sse import EventsDropped
from kedge.server.storage.database import SQLiteServerDatabase
from kedge.testing import TestServer, serve
from server.conftest import check_response_object, open_client, parse_events
from server.gated_model import GatedModel
from server.routes.test_responses_stream import FailingModel
from server.waiting import wait_until

Event = dict[str, Any]


@pytest.fixture
def server(model: GatedModel) -> Iterator[TestServer]:
    """Yield a server with the gated model."""
    with serve(model=model) as running:
        yield running


def create_response(http: httpx2.Client, prompt: str = "wait", **body: Any) -> Any:
    request = {"model": "m", "input": prompt, "background": True, **body}
    return http.post("/v1/responses", json=request).json()


def create_streamed(http: httpx2.Client) -> str:
    """Create a response, read its stream to the end, and return its id."""
    with open_stream(http, "hello") as events:
        (first, *_) = events
        return first["response"]["id"]


def wait_for(http: httpx2.Client, response: Any, status: str) -> Any:
    """Wait until a response has a status, and return it."""
    wait_until(lambda: get_status(http, response["id"]) == status)
    return http.get(f"/v1/responses/{response['id']}").json()


def cancel(http: httpx2.Client, response_id: str) -> httpx2.Response:
    return http.post(f"/v1/responses/{response_id}/cancel")


def resume_rejected(http: httpx2.Client, response_id: str, **query: Any) -> Any:
    """Return the error of a stream that cannot be resumed."""
    answer = http.get(f"/v1/responses/{response_id}", params={"stream": "true", **query})
    assert answer.status_code == 400
    return answer.json()["error"]


def get_status(http: httpx2.Client, response_id: str) -> str:
    return http.get(f"/v1/responses/{response_id}").json()["status"]


@contextmanager
def open_stream(
    http: httpx2.Client, prompt: str = "wait", **body: Any
) -> Iterator[Iterator[Event]]:
    """Create a response, and yield its events."""
    request = {"model": "m", "input": prompt, "background": True, "stream": True, **body}
    with http.stream("POST", "/v1/responses", json=request) as answer:
        yield parse_events(answer.iter_lines())


@contextmanager
def resume_stream(http: httpx2.Client, response_id: str, **query: Any) -> Iterator[Iterator[Event]]:
    """Read the stream of a response again, and yield its events."""
    params = {"stream": "true", **query}
    with http.stream("GET", f"/v1/responses/{response_id}", params=params) as answer:
        yield parse_events(answer.iter_lines())


def read(events: Iterator[Event], number: int) -> list[Event]:
    """Read a number of events."""
    return list(islice(events, number))


def test_running_and_queued_responses_are_limited(model: GatedModel) -> None:
    """Responses above the limit are queued; one that does not fit in the queue is rejected."""
    limits = Limits(background_running=1, background_waiting=1, shutdown_seconds=1)
    with serve(model=model, limits=limits) as server, open_client(server) as http:
        first = create_response(http, "wait 1")
        second = create_response(http, "wait 2")
        check_response_object(second)
        assert (second["status"], second["background"], second["output"]) == ("queued", True, [])
        wait_for(http, first, "in_progress")
        assert get_status(http, second["id"]) == "queued"
        rejected = create_response(http, "wait 3")
        assert rejected["error"]["code"] == "rate_limit_exceeded"
        model.open_gate()
        completed = check_response_object(wait_for(http, second, "completed"))
        assert completed["output"][0]["content"][0]["text"] == "answer to wait 2"
        assert get_status(http, first["id"]) == "completed"
        assert model.started == ["wait 1", "wait 2"]


def test_stream_continues_without_a_reader(http: httpx2.Client, model: GatedModel) -> None:
    """Disconnecting does not stop the response, whose events any number of readers get from any number on."""
    with open_stream(http) as events:
        first = read(events, 6)
    response_id = first[0]["response"]["id"]
    with (
        resume_stream(http, response_id) as complete,
        resume_stream(http, response_id, starting_after=5) as end,
    ):
        assert read(complete, 6) == first
        model.open_gate()
        rest = list(end)
        assert list(complete) == rest
    numbers = [event["sequence_number"] for event in [*first, *rest]]
    assert numbers == list(range(len(numbers)))
    assert rest[-1]["type"] == "response.completed"
    with resume_stream(http, response_id) as events:
        assert list(events) == [*first, *rest]


def test_a_stream_starts_with_the_states_of_its_response(http: httpx2.Client) -> None:
    """A background response is created and queued before it is in progress."""
    with open_stream(http) as events:
        first = read(events, 6)
    types = [event["type"].removeprefix("response.") for event in first]
    assert types[:3] == ["created", "queued", "in_progress"]
    assert types[3:] == ["output_item.added", "content_part.added", "output_text.delta"]
    statuses = [event["response"]["status"] for event in first[:3]]
    assert statuses == ["queued", "queued", "in_progress"]


def test_the_head_of_a_running_stream_has_no_body(http: httpx2.Client) -> None:
    """After it the connection can be used again."""
    with open_stream(http) as events:
        response_id = next(events)["response"]["id"]
    head = http.head(f"/v1/responses/{response_id}", params={"stream": "true"})
    assert head.headers["content-type"].startswith("text/event-stream")
    wait_until(lambda: get_status(http, response_id) == "in_progress")


@for_each("number", ["10000", "0" * 30 + "10000"])
def test_a_stream_after_its_last_event_is_empty(http: httpx2.Client, number: str) -> None:
    """Only the end of the stream is sent."""
    response_id = create_streamed(http)
    answer = http.get(f"/v1/responses/{response_id}?stream=true&starting_after={number}")
    assert answer.content == b"data: [DONE]\n\n"


@pytest.mark.parametrize("value", ["True", "1", "yes", ""])
def test_stream_of_a_query_is_true_or_false(http: httpx2.Client, value: str) -> None:
    """Another value is rejected, because its client would wait for events that are not sent."""
    known = create_streamed(http)
    assert http.get(f"/v1/responses/{known}?stream=false").json()["id"] == known
    rejected = http.get(f"/v1/responses/{known}", params={"stream": value})
    assert (rejected.status_code, rejected.json()["error"]["param"]) == (400, "stream")
    assert "Supported values are: 'true' and 'false'." in rejected.json()["error"]["message"]


def test_a_stream_that_cannot_be_resumed(server: TestServer, http: httpx2.Client) -> None:
    """Only a background stream can be resumed, after an event number of at most 53 bits, for five minutes."""
    known = create_streamed(http)
    for after in ("x", "-1", "1.5", str(2**53), "9" * 30):
        assert resume_rejected(http, known, starting_after=after)["param"] == "starting_after"
    plain = create_response(http, "x", background=False)
    assert resume_rejected(http, plain["id"])["message"] == (
        "This response cannot be streamed because it was not created with background=true."
    )
    unwatched = create_response(http, "hello")
    assert resume_rejected(http, unwatched["id"])["code"] == "stream_not_kept"
    server.clock.advance(seconds=301)
    assert resume_rejected(http, known)["code"] == "stream_not_kept"
    assert get_status(http, known) == "completed"


def test_finished_streams_are_dropped_at_the_memory_limit(model: GatedModel) -> None:
    """The oldest streams are dropped above the memory limit; their responses remain."""
    limits = Limits(stream_bytes=10_000, shutdown_seconds=1)
    with serve(model=model, limits=limits) as server, open_client(server) as http:
        ids = [create_streamed(http) for _ in range(3)]
        statuses = [http.get(f"/v1/responses/{known}?stream=true").status_code for known in ids]
        assert statuses == [400, 400, 200]
        assert [get_status(http, known) for known in ids] == ["completed"] * 3


async def test_long_stream_drops_its_oldest_events() -> None:
    """The newest event is not dropped."""
    log = EventLog()
    log.append([b"a", b"b", b"c"])
    assert [log.drop_oldest(), log.drop_oldest(), log.drop_oldest()] == [b"a", b"b", None]
    assert not log.has_all_after(0)
    assert log.has_all_after(1)


async def test_a_reader_of_dropped_events_gets_an_error() -> None:
    """A reader that had read them continues."""
    log = EventLog()
    log.append([b"a", b"b"])
    quick = log.read(-1)
    slow = log.read(-1)
    assert await anext(quick) == b"ab"
    log.append([b"c"])
    log.drop_oldest()
    log.drop_oldest()
    log.end(0.0)
    assert [frames async for frames in quick] == [b"c"]
    with pytest.raises(EventsDropped):
        await anext(slow)


async def test_the_memory_limit_drops_no_more_than_needed() -> None:
    """Finished streams are dropped first, then the oldest events of the stream that grows."""
    jobs = BackgroundJobs(Limits(stream_bytes=10), lambda: 0.0)
    logs = jobs._logs
    logs.update({name: EventLog() for name in ("first", "second", "active")})
    for log in logs.values():
        log.append([b"1234"])
    logs["first"].end(1.0)
    logs["second"].end(2.0)
    active = logs["active"]
    jobs._enforce_byte_limit(active)
    assert list(logs) == ["second", "active"]
    active.append([b"1234", b"1234"])
    jobs._enforce_byte_limit(active)
    assert list(logs) == ["active"]
    assert [active.has_all_after(number) for number in (-1, 0)] == [False, True]


def test_cancelling_stops_the_model_and_is_idempotent(
    http: httpx2.Client, model: GatedModel, server: TestServer
) -> None:
    """A cancelled response has no output, its stream fails, and a second cancellation returns the same response."""
    with open_stream(http) as events:
        known: str = read(events, 6)[0]["response"]["id"]
        cancelled = cancel(http, known)
        (*_, last) = events
    assert cancelled.status_code == 200
    assert (cancelled.json()["status"], cancelled.json()["output"]) == ("cancelled", [])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")
    assert last["response"]["error"] is None
    wait_until(lambda: model.cancelled == ["wait"])
    for repeated in (cancel(http, known), http.get(f"/v1/responses/{known}")):
        assert repeated.json() == cancelled.json()
    assert server.running == 0


def test_queued_response_can_be_cancelled(model: GatedModel) -> None:
    """A cancelled response in the queue never starts, and the next one runs."""
    limits = Limits(background_running=1, shutdown_seconds=1)
    with serve(model=model, limits=limits) as server, open_client(server) as http:
        create_response(http, "wait 1")
        wait_until(lambda: model.started)
        with open_stream(http, "two") as events:
            known: str = read(events, 2)[0]["response"]["id"]
            assert cancel(http, known).json()["status"] == "cancelled"
            assert [event["type"] for event in events] == ["response.failed"]
        third = create_response(http, "three")
        model.open_gate()
        wait_for(http, third, "completed")
        assert model.started == ["wait 1", "three"]


def test_cancelling_a_finished_response_is_rejected(http: httpx2.Client) -> None:
    """Completed, synchronous and unknown responses cannot be cancelled."""
    for background, kind in ((True, "completed"), (False, "synchronous")):
        response = create_response(http, "hello", background=background)
        wait_for(http, response, "completed")
        rejected = cancel(http, response["id"])
        assert rejected.status_code == 400
        assert rejected.json()["error"]["message"] == f"Cannot cancel a {kind} response."
    assert cancel(http, "resp_x").status_code == 404


@contextmanager
def run_in_conversation(
    http: httpx2.Client, model: GatedModel, *, background: bool
) -> Iterator[tuple[str, str, Iterator[Event]]]:
    """Yield the ids of a conversation and of a response that runs in it, and the next events of the response."""
    conversation: str = http.post("/v1/conversations", json={}).json()["id"]
    with open_stream(http, background=background, conversation=conversation) as events:
        first, *_ = read(events, 5 + background)
        response_id: str = first["response"]["id"]
        assert get_status(http, response_id) == "in_progress"
        yield conversation, response_id, events
        model.open_gate()


def find_error_code(http: httpx2.Client, **body: Any) -> str | None:
    """Return the code of the error of a request that continues something, or None."""
    error = create_response(http, "x", background=False, **body)["error"]
    return None if error is None else error["code"]


@pytest.mark.parametrize("background", [False, True])
def test_an_unfinished_response_cannot_be_continued(
    http: httpx2.Client, model: GatedModel, background: bool
) -> None:
    """Neither by its id, which a client sees from its first delta on, nor in its conversation."""
    with run_in_conversation(http, model, background=background) as (conversation, response_id, _):
        code = find_error_code(http, previous_response_id=response_id)
        assert code == "previous_response_not_completed"
        assert find_error_code(http, conversation=conversation) == "conversation_locked"


@pytest.mark.parametrize("background", [False, True])
def test_an_unfinished_response_cannot_be_deleted(
    http: httpx2.Client, model: GatedModel, background: bool
) -> None:
    """The error says that it is in flight."""
    with run_in_conversation(http, model, background=background) as (_, response_id, _):
        deleted = http.delete(f"/v1/responses/{response_id}").json()
        assert deleted["error"]["message"] == "Cannot delete an in-flight response."


@pytest.mark.parametrize("background", [False, True])
def test_a_finished_response_unlocks_its_conversation(
    http: httpx2.Client, model: GatedModel, background: bool
) -> None:
    """From its last event on it can be continued, also in the conversation, and deleted."""
    with run_in_conversation(http, model, background=background) as (
        conversation,
        response_id,
        events,
    ):
        model.open_gate()
        *_, last = events
        assert last["type"] == "response.completed"
    assert len(http.get(f"/v1/conversations/{conversation}/items").json()["data"]) == 2
    assert find_error_code(http, previous_response_id=response_id) is None
    assert find_error_code(http, conversation=conversation) is None
    assert http.delete(f"/v1/responses/{response_id}").status_code == 200


def test_background_requires_storage() -> None:
    """A background response that is not stored is rejected, because it could not be retrieved."""
    for retention in (True, False):
        with serve(zero_data_retention=not retention) as server, open_client(server) as http:
            rejected = create_response(http, "x", store=not retention)
        assert rejected["error"]["param"] == "background"


def test_model_error_fails_the_response() -> None:
    """The stream ends with an error, and the stored response has the status failed."""
    with serve(model=FailingModel()) as server, open_client(server) as http:
        with open_stream(http) as stream:
            events = list(stream)
        response = http.get(f"/v1/responses/{events[0]['response']['id']}").json()
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")


def test_stopping_the_server_fails_unfinished_responses(model: GatedModel, tmp_path: Path) -> None:
    """After the shutdown timeout, running and queued responses are stored as failed with the reason."""
    db = str(tmp_path / "server.db")
    limits = Limits(background_running=1, shutdown_seconds=0)
    with serve(model=model, db=db, limits=limits) as server, open_client(server) as http:
        responses = [create_response(http, f"wait {number}") for number in range(2)]
        wait_until(lambda: model.started)
    with serve(db=db) as server, open_client(server) as http:
        for each in responses:
            assert wait_for(http, each, "failed")["error"]["message"] == (
                "The server was stopped before this response was finished."
            )


def test_crash_fails_unfinished_responses(model: GatedModel, tmp_path: Path) -> None:
    """A restart marks running and queued responses as failed and does not resume them."""
    db = str(tmp_path / "server.db")
    with serve(model=model, db=db) as server, open_client(server) as http:
        responses = [create_response(http, "hello") for _ in range(2)]
        for each in responses:
            wait_for(http, each, "completed")
    database = SQLiteServerDatabase(db)
    for node, left in ((1, "queued"), (2, "in_progress")):
        result_fields = "CAST(replace(result_fields, 'completed\"', ?) AS BLOB)"
        statement = f"UPDATE kedge_server_nodes SET status = ?, result_fields = {result_fields} WHERE id = ?"  # noqa: S608
        database.execute(statement, (left, f'{left}"', node))
    database._connection.close()  # without a clean shutdown
    with serve(db=db) as server, open_client(server) as http:
        for each in responses:
            stored = wait_for(http, each, "failed")
            assert stored["error"]["message"] == (
                "The server was restarted before this response was finished."
            )
            continued = create_response(http, "x", previous_response_id=each["id"])
            assert continued["error"]["code"] == "previous_response_not_completed"
            assert cancel(http, each["id"]).status_code == 400
