"""Tests of existing programs through `kedge.chain` and through `kedge proxy`, and of upstream failures.

Each test compares the context of every answered request with the history that the program sent.
"""

import base64
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from openai import APIError, InternalServerError, OpenAI, RateLimitError

from chaining.programs import ask, bodies, check_contexts, message, replay, typed
from chaining.proxy.running import serve_proxy
from kedge.chaining import chain
from kedge.testing import TestServer
from normalization import normalize_items

PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(32)).decode()


@pytest.fixture(params=["chain", "proxy"])
def client(request: pytest.FixtureRequest, server: TestServer) -> Iterator[OpenAI]:
    """Yield a client whose requests become incremental."""
    if request.param == "proxy":
        with (
            serve_proxy(server.base_url) as url,
            OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as openai_client,
        ):
            yield openai_client
        return
    with OpenAI(base_url=server.base_url, api_key="key", max_retries=0) as openai_client:
        yield chain(openai_client)


def anchors(server: TestServer) -> list[str]:
    """Return the response id that each request was chained to, or an empty string for a full request."""
    return [body.get("previous_response_id") or "" for body in bodies(server)]


def test_a_client_that_stores_nothing(server: TestServer, client: OpenAI) -> None:
    """A response that was not stored is not used as an anchor, but an older stored one is."""
    history: list[Any] = []
    first = ask(client, history, "One")
    ask(client, history, "Two", store=False)
    ask(client, history, "Three")
    assert anchors(server) == ["", "", first.id]
    check_contexts(server, [history[:1], history[:3], history[:5]])


def test_a_client_with_a_conversation_object(server: TestServer, client: OpenAI) -> None:
    """Requests with a conversation object are passed through, and their responses are not anchors."""
    conversation = client.conversations.create()
    first = client.responses.create(
        model="practice", input="My name is Ada.", conversation=conversation.id
    )
    second = client.responses.create(
        model="practice", input="What is my name?", conversation=conversation.id
    )
    assert second.output_text == "Your name is Ada."
    history = [message("My name is Ada."), *replay(first)]
    ask(client, history, "And?")
    assert not any(anchors(server))


def test_a_client_that_chains_on_a_foreign_response(server: TestServer, client: OpenAI) -> None:
    """A response chained to an unknown one is not used as an anchor."""
    with OpenAI(base_url=server.base_url, api_key="key") as plain:
        foreign = plain.responses.create(model="practice", input="My name is Ada.")
    second = client.responses.create(
        model="practice", input="What is my name?", previous_response_id=foreign.id
    )
    assert second.output_text == "Your name is Ada."
    history = [message("What is my name?"), *replay(second)]
    ask(client, history, "Say 1")
    assert anchors(server)[-1] == ""
    assert normalize_items(server.requests[-1].context) == normalize_items(typed(history[:-1]))


def test_a_client_with_item_references(server: TestServer, client: OpenAI) -> None:
    """A request with item references is sent as written, and its response is not used as an anchor."""
    first = client.responses.create(model="practice", input="My name is Ada.")
    items: Any = [
        {"type": "item_reference", "id": first.output[0].id},
        message("What did you say?"),
    ]
    second = client.responses.create(model="practice", input=items)
    assert len(bodies(server)[-1]["input"]) == 2
    ask(client, [*replay(first), message("What did you say?"), *replay(second)], "Say 1")
    assert anchors(server) == ["", "", ""]


def test_a_background_response_is_an_anchor_after_its_retrieval(
    server: TestServer, client: OpenAI
) -> None:
    """The output of a background response is unknown until the program retrieves it."""
    history: list[Any] = []
    first = ask(client, history, "My name is Ada.")
    history.append(message("What is my name?"))
    second = client.responses.create(model="practice", input=history, background=True)
    deadline = time.monotonic() + 300
    while second.status in ("queued", "in_progress") and time.monotonic() < deadline:
        second = client.responses.retrieve(second.id)
    assert second.output_text == "Your name is Ada."
    history += replay(second)
    ask(client, history, "Say 3")
    assert anchors(server) == ["", "", second.id]
    assert first.id != second.id
    check_contexts(server, [history[:1], history[:3], history[:5]])


def test_a_streamed_background_response_is_an_anchor(server: TestServer, client: OpenAI) -> None:
    """The stream of a background response contains its output, so the response is an anchor."""
    history: list[Any] = [message("Say 1")]
    stream = client.responses.create(model="practice", input=history, background=True, stream=True)
    response = [event for event in stream if event.type == "response.completed"][-1].response
    history += replay(response)
    ask(client, history, "Say 2")
    assert anchors(server) == ["", response.id]


def test_reasoning_is_replayed_dropped_or_edited(server: TestServer, client: OpenAI) -> None:
    """The server's reasoning is used; after an earlier edit, the resent reasoning items are sent."""
    options: Any = {"reasoning": {"effort": "high"}, "include": ["reasoning.encrypted_content"]}
    history: list[Any] = []
    first = ask(client, history, "What is 2+3?", **options)
    assert any(item["type"] == "reasoning" for item in history if "type" in item)
    edited = [
        {**item, "summary": [{"type": "summary_text", "text": "Edited"}]}
        if item.get("type") == "reasoning"
        else item
        for item in history
    ]
    dropped = [item for item in history if item.get("type") != "reasoning"]
    for variant in (history, edited, dropped):
        ask(client, list(variant), "And 4*5?", **options)
    assert anchors(server)[1:] == [first.id] * 3
    ask(client, history, "And 6*7?", **options)
    history[0] = message("What is 2+4?")
    ask(client, history, "And 8*9?", **options)
    assert anchors(server)[-1] == ""
    assert len(bodies(server)[-1]["input"]) == len(history) - 2


def test_images_and_files_are_compared_by_content(server: TestServer, client: OpenAI) -> None:
    """An equal image or file is covered by the anchor, and a different one is sent."""
    data = f"data:image/png;base64,{PIXEL}"
    image = {"type": "input_image", "image_url": data, "detail": "auto"}
    text = {"type": "input_text", "text": "Look"}
    file = {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,aGk="}
    history: list[Any] = [{"role": "user", "content": [text, image, file]}]
    first = client.responses.create(model="practice", input=history)
    history += replay(first)
    ask(client, history, "And?")
    assert anchors(server)[-1] == first.id
    changed: Any = {**image, "image_url": data.replace("AAAA", "BBBB")}
    history[0] = {"role": "user", "content": [text, changed, file]}
    ask(client, history, "And?")
    assert anchors(server)[-1] == ""


def test_a_compacted_conversation_is_chained_again(server: TestServer, client: OpenAI) -> None:
    """The program continues from the compaction item of the response."""
    history: list[Any] = []
    for number in range(3):
        ask(client, history, f"My name is Ada. Note {number}.")
    compacted = client.responses.compact(model="practice", input=history)
    window: list[Any] = [item.model_dump(exclude_none=True) for item in compacted.output]
    assert any(item.get("type") == "compaction" for item in window)
    first = ask(client, window, "What is my name?")
    assert first.output_text == "Your name is Ada."
    assert ask(client, window, "What is my name?").output_text == "Your name is Ada."
    assert anchors(server)[-2:] == ["", first.id]


def test_an_automatic_compaction_starts_a_new_chain(server: TestServer, client: OpenAI) -> None:
    """The response that compacts is not used as an anchor, and the next one is."""
    history: list[Any] = []
    options: Any = {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}
    for number in range(4):
        ask(client, history, f"Note {number}: " + "lorem ipsum " * 200, **options)
    assert any(item.get("type") == "compaction" for item in history)
    for _ in range(2):
        answer = ask(client, history, "Say 7")
        assert answer.output_text == "7"
    assert anchors(server)[-1]


@pytest.mark.parametrize(
    ("fault", "error"), [("status=429", RateLimitError), ("status=500", InternalServerError)]
)
def test_errors_of_the_upstream_reach_the_program(
    server: TestServer, client: OpenAI, fault: str, error: type[APIError]
) -> None:
    """The program gets the same errors as without Kedge, and the next request is chained again."""
    history: list[Any] = []
    first = ask(client, history, "One")
    server.faults.set(fault, times=1)
    with pytest.raises(error):
        ask(client, list(history), "Two")
    ask(client, history, "Two")
    assert anchors(server)[-1] == first.id


def test_a_cut_stream_is_cut_for_the_program(server: TestServer, client: OpenAI) -> None:
    """The program gets an error, and the context of its next request is correct."""
    history: list[Any] = []
    ask(client, history, "One")
    server.faults.set("cut_after_events=6", times=1)
    messages: Any = [*history, message("Count to 9")]
    with pytest.raises((APIError, httpx2.HTTPError)):
        list(client.responses.create(model="practice", input=messages, stream=True))
    assert ask(client, history, "Count to 9").output_text == "1 2 3 4 5 6 7 8 9"
    check_contexts(server, [history[:1], history[:3], history[:3]])
