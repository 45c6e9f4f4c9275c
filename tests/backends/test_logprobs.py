"""Log probabilities of tokens are passed from a provider to the clients that request them."""

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
from openai import OpenAI
from openai.types.responses import (
    ResponseCompletedEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
)
from starlette.requests import Request
from starlette.responses import Response

from backends.conftest import make_model
from engines.fake_server import json_response, serve_handler
from kedge.backends import EngineModel
from kedge.middleware import guard, redact, with_middleware
from kedge.providers import connect
from kedge.server.models import Model
from kedge.testing import serve

TOKENS = ["It", " is", " \U0001f600", ".", " END", " here"]
INCLUDE = "message.output_text.logprobs"


def build_logprobs(tokens: list[str], top: int) -> list[dict[str, Any]]:
    """Return the log probabilities of these tokens, with alternatives."""
    return [
        {
            "token": token,
            "logprob": -0.5,
            "bytes": list(token.encode()),
            "top_logprobs": [
                {"token": f"{token}{rank}", "logprob": -float(rank), "bytes": None}
                for rank in range(top)
            ],
        }
        for token in tokens
    ]


def encode_events(events: list[dict[str, Any]]) -> Response:
    frames = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return Response(frames, media_type="text/event-stream")


async def answer(request: Request) -> Response:
    """Answer with the tokens, and with their log probabilities if they are requested."""
    body = await request.json()
    if request.url.path.endswith("/chat/completions"):
        requested = body.get("logprobs") is True
        return _complete(body, build_logprobs(TOKENS, body.get("top_logprobs", 0)) * requested)
    requested = INCLUDE in body.get("include", ())
    return _respond(body, build_logprobs(TOKENS, body.get("top_logprobs", 0)) * requested)


def _respond(body: dict[str, Any], logprobs: list[dict[str, Any]]) -> Response:
    part = {"type": "output_text", "text": "".join(TOKENS), "annotations": [], "logprobs": logprobs}
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
    finished = {"id": "resp_1", "status": "completed", "output": [{**message, "content": [part]}]}
    if not body["stream"]:
        return json_response(finished)
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    deltas = [
        {
            **place,
            "type": "response.output_text.delta",
            "delta": token,
            "logprobs": logprobs[index : index + 1],
        }
        for index, token in enumerate(TOKENS)
    ]
    return encode_events(
        [
            {"type": "response.created", "response": {"id": "resp_1", "output": []}},
            {"type": "response.output_item.added", "output_index": 0, "item": message},
            *deltas,
            {
                "type": "response.output_item.done",
                "output_index": 0,
                "item": {**message, "content": [part]},
            },
            {"type": "response.completed", "response": finished},
        ]
    )


def _complete(body: dict[str, Any], logprobs: list[dict[str, Any]]) -> Response:
    """Return a completion; a stream sends the emoji after the token of its first byte, as OpenAI does."""
    if not body.get("stream"):
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(TOKENS)},
            "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
            "finish_reason": "stop",
        }
        return json_response({"id": "c_1", "object": "chat.completion", "choices": [choice]})
    texts = [*TOKENS[:2], "", TOKENS[2] + TOKENS[3], *TOKENS[4:]]
    choices = [
        {
            "index": 0,
            "delta": {"content": text},
            "logprobs": {"content": logprobs[index : index + 1], "refusal": None},
        }
        for index, text in enumerate(texts)
    ]
    choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    return encode_events([{"id": "c_1", "choices": [choice]} for choice in choices])


@contextmanager
def open_client(
    kind: str, make_model: Callable[[str, str], Model] = make_model
) -> Generator[OpenAI]:
    """Yield a client of a server in front of a provider with log probabilities."""
    with (
        serve_handler(answer) as url,
        serve(model=make_model(kind, url)) as front,
        OpenAI(base_url=front.base_url, api_key="any", max_retries=0) as client,
    ):
        yield client


def read_message(response: Any) -> ResponseOutputText:
    """Return the text of a response."""
    [message] = response.output
    assert isinstance(message, ResponseOutputMessage)
    [part] = message.content
    assert isinstance(part, ResponseOutputText)
    return part


def dump(logprobs: Any) -> list[dict[str, Any]]:
    """Return log probabilities as plain objects."""
    return [each.model_dump(exclude_unset=True) for each in logprobs or ()]


KINDS = pytest.mark.parametrize("kind", ["responses", "responses, stateless", "chat"])


@KINDS
def test_complete_response_has_them(kind: str) -> None:
    """They are in the text of the response, also when it is retrieved, and only if they were requested."""
    with open_client(kind) as client:
        request: Any = {"model": "m", "input": "Hi", "include": [INCLUDE]}
        response = client.responses.create(**request, top_logprobs=2)
        plain = client.responses.create(**request)
        without = client.responses.create(model="m", input="Hi")
        retrieved = client.responses.retrieve(response.id)
        followed = client.responses.create(
            model="m", input="And?", previous_response_id=response.id
        )
    assert read_message(response).text == "".join(TOKENS)
    assert dump(read_message(response).logprobs) == build_logprobs(TOKENS, 2)
    assert dump(read_message(retrieved).logprobs) == build_logprobs(TOKENS, 2)
    assert dump(read_message(plain).logprobs) == build_logprobs(TOKENS, 0)
    assert read_message(without).logprobs == []
    assert read_message(followed).logprobs == []


@KINDS
def test_streamed_response_has_them_with_each_delta(kind: str) -> None:
    """Each delta has those of its tokens, and the end of the text has all of them."""
    with open_client(kind) as client:
        request: Any = {"model": "m", "input": "Hi", "include": [INCLUDE], "top_logprobs": 1}
        events = list(client.responses.create(**request, stream=True))
        without = list(client.responses.create(model="m", input="Hi", stream=True))
    deltas = [event for event in events if isinstance(event, ResponseTextDeltaEvent)]
    assert "".join(event.delta for event in deltas) == "".join(TOKENS)
    found = [each for event in deltas for each in dump(event.logprobs)]
    assert found == build_logprobs(TOKENS, 1)
    assert all("".join(each.token for each in event.logprobs) == event.delta for event in deltas)
    [done] = [event for event in events if isinstance(event, ResponseTextDoneEvent)]
    assert dump(done.logprobs) == found
    completed = events[-1]
    assert isinstance(completed, ResponseCompletedEvent)
    assert dump(read_message(completed.response).logprobs) == found
    assert not any(e.logprobs for e in without if isinstance(e, ResponseTextDeltaEvent))


@KINDS
@pytest.mark.parametrize("stream", [False, True])
def test_chat_completion_has_them(kind: str, stream: bool) -> None:
    """The Chat Completions API has them in its choice, in one list or with each chunk."""
    request: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    with open_client(kind) as client:
        found, without = (
            _read_choices(client, stream, **request, **options)
            for options in ({"logprobs": True, "top_logprobs": 2}, {})
        )
    assert found == build_logprobs(TOKENS, 2)
    assert without == []


def _read_choices(client: OpenAI, stream: bool, **request: Any) -> list[dict[str, Any]]:
    answered: Any = client.chat.completions.create(**request, stream=stream)
    choices = [chunk.choices[0] for chunk in (answered if stream else [answered])]
    return [each for choice in choices if choice.logprobs for each in dump(choice.logprobs.content)]


@KINDS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "kept"), [("END", 5), (". E", 3), ("Zz", 6), ("s \U0001f600x", 6)]
)
def test_stop_sequence_ends_them_with_the_text(
    kind: str, stream: bool, stop: str, kept: int
) -> None:
    """Tokens behind a stop sequence are left out; one that contains its beginning is not."""
    request: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stop": stop}
    with open_client(kind) as client:
        found = _read_choices(client, stream, **request, logprobs=True)
    assert found == build_logprobs(TOKENS[:kept], 0)


def make_guarded_model(kind: str, url: str) -> Model:
    """Create a backend with a guard that changes the answer."""
    name, _, option = kind.partition(", ")
    engine = connect(f"{name}:{url}#practice", timeout=300)
    guarded = with_middleware(engine, guard(redact("here")))
    return EngineModel("practice", guarded, stateless=bool(option))


@KINDS
@pytest.mark.parametrize("stream", [False, True])
def test_redacted_text_has_none(kind: str, stream: bool) -> None:
    """Tokens of a text that a guard changed are not shown."""
    request: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    with open_client(kind, make_guarded_model) as client:
        assert _read_choices(client, stream, **request, logprobs=True) == []
