"""Creating responses, whole and streamed, with the official client over a real socket."""

import pytest
from openai import BadRequestError, OpenAI
from openresponses_types import ResponseResource

from kedge.testing import TestServer


def test_a_response_has_every_key_of_the_open_resource(client: OpenAI) -> None:
    """Both the official client and the Open Responses schema can read the body."""
    raw = client.responses.with_raw_response.create(model="practice", input="hello")
    body = raw.http_response.json()
    assert ResponseResource.model_validate(body).status == "completed"
    assert raw.parse().output_text


def test_a_chained_response_sees_what_was_said_before(client: OpenAI, server: TestServer) -> None:
    """The context of a response is its parent's input and output, then the new input."""
    first = client.responses.create(model="practice", input="one")
    client.responses.create(model="practice", input="two", previous_response_id=first.id)
    context = server.requests[-1].context
    assert context is not None
    assert [item["role"] for item in context] == ["user", "assistant", "user"]


def test_usage_grows_along_a_chain(client: OpenAI) -> None:
    """Every earlier token counts as input again."""
    first = client.responses.create(model="practice", input="one")
    second = client.responses.create(model="practice", input="two", previous_response_id=first.id)
    assert first.usage
    assert second.usage
    assert second.usage.input_tokens > first.usage.total_tokens


def test_an_unknown_previous_response_is_refused(client: OpenAI) -> None:
    """The error says which id is unknown, in the words of the hosted API."""
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(model="practice", input="x", previous_response_id="resp_x")
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


def test_an_unstored_response_cannot_be_continued(client: OpenAI) -> None:
    """``store: false`` means that nothing is kept."""
    first = client.responses.create(model="practice", input="one", store=False)
    with pytest.raises(BadRequestError, match="not found"):
        client.responses.create(model="practice", input="two", previous_response_id=first.id)


def test_a_stream_tells_every_event_in_order(client: OpenAI) -> None:
    """Numbers rise by one from zero and the last event holds the whole response."""
    events = list(client.responses.create(model="practice", input="hello there", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    assert types[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert types[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(types[4:-4]) == {"response.output_text.delta"}
    last = events[-1]
    assert last.type == "response.completed"
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert last.response.output_text == text


def test_a_streamed_response_can_be_continued(client: OpenAI, server: TestServer) -> None:
    """What was streamed is remembered like anything else."""
    with client.responses.stream(model="practice", input="one") as stream:
        first = stream.get_final_response()
    client.responses.create(model="practice", input="two", previous_response_id=first.id)
    context = server.requests[-1].context
    assert context is not None
    assert len(context) == 3
