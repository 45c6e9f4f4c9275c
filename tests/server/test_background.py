"""Background responses: polling, cancellation, resumed streams and restarts."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kedge.server.background import EventLog
from kedge.server.models import ItemClosed, OutputEvent, Prompt
from kedge.server.settings import Limits
from kedge.server.sse import EventsDropped
from kedge.server.storage.database import SQLiteServerDatabase
from kedge.testing import TestServer, serve
from server.conftest import Connect, check_response_object, open_client, parse_events
from server.gated_model import GatedModel
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


def create_conversation(http: httpx2.Client) -> str:
    return http.post("/v1/conversations", json={}).json()["id"]


def create_streamed(http: httpx2.Client) -> str:
    """Create a response, read its stream to the end, and return its id."""
    with open_stream(http, "hello") as answer:
        return EventReader(answer).read_rest()[0]["response"]["id"]


def wait_for(http: httpx2.Client, response: Any, status: str) -> Any:
    """Wait until a response has a status, and return it."""
    wait_until(lambda: get_status(http, response["id"]) == status)
    return http.get(f"/v1/responses/{response['id']}").json()


def cancel(http: httpx2.Client, response_id: str) -> httpx2.Response:
    return http.post(f"/v1/responses/{response_id}/cancel")


def resume_rejected(http: httpx2.Client, response_id: str, **query: Any) -> Any:
    """Return the error of a stream that cannot be resumed."""
    with resume_stream(http, response_id, **query) as answer:
        answer.read()
    assert answer.status_code == 400
    return answer.json()["error"]


def get_status(http: httpx2.Client, response_id: str) -> str:
    return http.get(f"/v1/responses/{response_id}").json()["status"]


class EventReader:
    """A reader of one stream."""

    def __init__(self, answer: httpx2.Response) -> None:
        self.answer = answer
        self._events = parse_events(answer.iter_lines())

    def read(self, number: int) -> list[Event]:
        return [next(self._events) for _ in range(number)]

    def read_rest(self) -> list[Event]:
        return list(self._events)


def open_stream(http: httpx2.Client, prompt: str = "wait", **body: Any) -> Any:
    request = {"model": "m", "input": prompt, "background": True, "stream": True, **body}
    return http.stream("POST", "/v1/responses", json=request)


def resume_stream(http: httpx2.Client, response_id: str, **query: Any) -> Any:
    return http.stream("GET", f"/v1/responses/{response_id}", params={"stream": "true", **query})


def test_response_is_queued_in_progress_and_completed(
    http: httpx2.Client, model: GatedModel
) -> None:
    """The status of a background response changes from queued to in progress to completed."""
    created = check_response_object(create_response(http))
    assert (created["status"], created["background"], created["output"]) == ("queued", True, [])
    wait_for(http, created, "in_progress")
    model.open_gate()
    response = check_response_object(wait_for(http, created, "completed"))
    assert response["output"][0]["content"][0]["text"] == "answer to wait"
    assert response["usage"]["output_tokens"] > 0


def test_running_and_queued_responses_are_limited(model: GatedModel) -> None:
    """Responses above the limit are queued; one that does not fit in the queue is rejected."""
    limits = Limits(background_running=1, background_waiting=1, shutdown_seconds=1)
    with serve(model=model, limits=limits) as server, open_client(server) as http:
        first, second = create_response(http, "wait 1"), create_response(http, "wait 2")
        wait_until(lambda: model.started)
        assert get_status(http, second["id"]) == "queued"
        rejected = create_response(http, "wait 3")
        assert rejected["error"]["code"] == "rate_limit_exceeded"
        model.open_gate()
        wait_for(http, second, "completed")
        assert get_status(http, first["id"]) == "completed"
        assert model.started == ["wait 1", "wait 2"]


def test_stream_continues_without_a_reader(http: httpx2.Client, model: GatedModel) -> None:
    """Disconnecting does not stop the response, and its later events can be read by sequence number."""
    with open_stream(http) as answer:
        first = EventReader(answer).read(6)
    types = [event["type"].removeprefix("response.") for event in first]
    assert types[:3] == ["created", "queued", "in_progress"]
    assert types[3:] == ["output_item.added", "content_part.added", "output_text.delta"]
    statuses = [event["response"]["status"] for event in first[:3]]
    assert statuses == ["queued", "queued", "in_progress"]
    known = first[0]["response"]["id"]
    head = http.head(f"/v1/responses/{known}", params={"stream": "true"})
    assert head.headers["content-type"].startswith("text/event-stream")
    assert get_status(http, known) == "in_progress"  # on the same connection
    model.open_gate()
    with resume_stream(http, known, starting_after=5) as answer:
        rest = EventReader(answer).read_rest()
    numbers = [event["sequence_number"] for event in [*first, *rest]]
    assert numbers == list(range(len(numbers)))
    assert rest[-1]["type"] == "response.completed"
    with resume_stream(http, known) as answer:
        assert EventReader(answer).read_rest() == [*first, *rest]
    with resume_stream(http, known, starting_after=10_000) as answer:
        assert answer.read() == b"data: [DONE]\n\n"


def test_several_readers_follow_one_stream(http: httpx2.Client, model: GatedModel) -> None:
    """Several readers follow a running stream from different positions to its end."""
    with open_stream(http) as first:
        one = EventReader(first)
        events = one.read(6)
        known = events[0]["response"]["id"]
        with (
            resume_stream(http, known, starting_after=3) as second,
            resume_stream(http, known) as third,
        ):
            two, three = EventReader(second), EventReader(third)
            assert two.read(2) == events[4:]
            assert three.read(6) == events
            model.open_gate()
            ends = [reader.read_rest() for reader in (one, two, three)]
    assert ends[0] == ends[1] == ends[2]
    assert ends[0][-1]["type"] == "response.completed"


def test_the_official_client_resumes_a_stream(server: TestServer, connect: Connect) -> None:
    """The client's ``retrieve`` resumes a stream after the last event it received."""
    client = connect(server)
    with client.responses.create(model="m", input="hello", background=True, stream=True) as stream:
        events = list(stream)
    created = events[0]
    assert created.type == "response.created"
    with client.responses.retrieve(created.response.id, stream=True, starting_after=4) as resumed:
        assert list(resumed) == events[5:]


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
    """A reader after the dropped events continues; a reader before them gets an error."""
    log = EventLog()
    log.append([b"a", b"b"])
    quick, slow = log.read(-1), log.read(-1)
    assert await anext(quick) == b"ab"
    log.append([b"c"])
    assert log.drop_oldest()
    assert log.drop_oldest()
    assert not log.drop_oldest()
    assert not log.has_all_after(0)
    assert log.has_all_after(1)
    log.end(0.0)
    assert await anext(quick) == b"c"
    assert [frames async for frames in quick] == []
    with pytest.raises(EventsDropped):
        await anext(slow)


def test_cancelling_stops_the_model_and_is_idempotent(
    http: httpx2.Client, model: GatedModel, server: TestServer
) -> None:
    """A cancelled response has no output, and a second cancellation returns the same response."""
    response = create_response(http)
    wait_until(lambda: model.started)
    cancelled = cancel(http, response["id"])
    assert cancelled.status_code == 200
    assert cancelled.json()["status"] == "cancelled"
    assert cancelled.json()["output"] == []
    wait_until(lambda: model.cancelled == ["wait"])
    repeated = cancel(http, response["id"])
    assert repeated.json() == cancelled.json() == http.get(f"/v1/responses/{response['id']}").json()
    assert server.running == 0


def test_cancelled_stream_ends_with_a_failure(http: httpx2.Client, model: GatedModel) -> None:
    """The stream of a cancelled response ends with a failed event whose response is cancelled."""
    with open_stream(http) as answer:
        reader = EventReader(answer)
        known = reader.read(6)[0]["response"]["id"]
        cancel(http, known)
        last = reader.read_rest()[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "cancelled"
    assert last["response"]["error"] is None


def test_queued_response_can_be_cancelled(model: GatedModel) -> None:
    """A cancelled response in the queue never starts, and the next one runs."""
    limits = Limits(background_running=1, shutdown_seconds=1)
    with serve(model=model, limits=limits) as server, open_client(server) as http:
        create_response(http, "wait 1")
        wait_until(lambda: model.started)
        with open_stream(http, "two") as answer:
            reader = EventReader(answer)
            known = reader.read(2)[0]["response"]["id"]
            assert cancel(http, known).json()["status"] == "cancelled"
            assert [event["type"] for event in reader.read_rest()] == ["response.failed"]
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


def test_unfinished_response_cannot_be_continued_or_deleted(
    http: httpx2.Client, model: GatedModel
) -> None:
    """A running response cannot be continued or deleted until it is completed."""
    response = create_response(http)
    wait_for(http, response, "in_progress")
    rejected = create_response(http, "x", background=False, previous_response_id=response["id"])
    assert rejected["error"]["code"] == "previous_response_not_completed"
    assert "is in_progress" in rejected["error"]["message"]
    deleted = http.delete(f"/v1/responses/{response['id']}")
    assert deleted.json()["error"]["message"] == "Cannot delete an in-flight response."
    model.open_gate()
    wait_for(http, response, "completed")
    continued = create_response(http, "x", background=False, previous_response_id=response["id"])
    assert continued["status"] == "completed"
    assert http.delete(f"/v1/responses/{response['id']}").status_code == 200


def test_streamed_response_cannot_be_deleted_before_its_end(
    http: httpx2.Client, model: GatedModel
) -> None:
    """A conversation would lack the exchange although its client sees the response from its first delta on."""
    conversation = create_conversation(http)
    with open_stream(http, background=False, conversation=conversation) as answer:
        reader = EventReader(answer)
        known: str = reader.read(5)[0]["response"]["id"]
        assert get_status(http, known) == "in_progress"
        deleted = http.delete(f"/v1/responses/{known}")
        model.open_gate()
        assert reader.read_rest()[-1]["type"] == "response.completed"
    assert deleted.json()["error"]["message"] == "Cannot delete an in-flight response."
    assert len(http.get(f"/v1/conversations/{conversation}/items").json()["data"]) == 2
    assert http.delete(f"/v1/responses/{known}").status_code == 200


def test_conversation_is_locked_by_its_background_response(
    http: httpx2.Client, model: GatedModel
) -> None:
    """Other responses are rejected until the background response has added its items."""
    conversation = create_conversation(http)
    response = create_response(http, conversation=conversation)
    rejected = create_response(http, "x", conversation=conversation)
    assert rejected["error"]["code"] == "conversation_locked"
    wait_until(lambda: model.started)
    model.open_gate()
    wait_for(http, response, "completed")
    items = http.get(f"/v1/conversations/{conversation}/items").json()["data"]
    assert len(items) == 2


def test_background_requires_storage() -> None:
    """A background response that is not stored is rejected, because it could not be retrieved."""
    for retention in (True, False):
        with serve(zero_data_retention=not retention) as server, open_client(server) as http:
            rejected = create_response(http, "x", store=not retention)
        assert rejected["error"]["param"] == "background"


def test_model_error_fails_the_response() -> None:
    """The stream ends with an error, and the stored response has the status failed."""

    class Broken(GatedModel):
        async def answer(self, prompt: Prompt) -> AsyncIterator[OutputEvent]:
            raise RuntimeError("broken")
            yield ItemClosed()

    with serve(model=Broken()) as broken, open_client(broken) as http:
        with open_stream(http) as answer:
            events = EventReader(answer).read_rest()
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        response = http.get(f"/v1/responses/{events[0]['response']['id']}").json()
    assert response["status"] == "failed"
    assert response["error"]["code"] == "server_error"


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
        became = "CAST(replace(became, 'completed\"', ?) AS BLOB)"
        statement = f"UPDATE kedge_server_nodes SET status = ?, became = {became} WHERE id = ?"  # noqa: S608
        database.execute(statement, (left, f'{left}"', node))
    database._connection.close()  # without a clean shutdown
    with serve(db=db) as server, open_client(server) as http:
        for each in responses:
            stored = wait_for(http, each, "failed")
            assert stored["error"]["message"] == (
                "The server was restarted before this response was finished."
            )
            assert cancel(http, each["id"]).status_code == 400
