"""Log probabilities of tokens are passed from a provider to the clients that request them."""

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
from openai import OpenAI
from starlette.requests import Request
from starlette.responses import Response

from backends.conftest import make_model
from engines.fake_server import json_response, serve_handler
from kedge.backends import EngineModel
from kedge.middleware import guard, redact, with_middleware
from kedge.providers import connect
from kedge.server.models import Model
from kedge.testing import serve
from server.conftest import ask

TOKENS = ["It", " is", " \U0001f600", ".", " END", " here"]
INCLUDE = "message.output_text.logprobs"


def build_logprobs(tokens: list[str], top: int) -> list[dict[str, Any]]:
    """Return the log probabilities of these tokens, with alternatives."""

    def build(token: str) -> dict[str, Any]:
        ranks = [{"token": f"{token}{n}", "logprob": -float(n), "bytes": None} for n in range(top)]
        return {"token": token, "logprob": -0.5, "bytes": [*token.encode()], "top_logprobs": ranks}

    return [build(token) for token in tokens]


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
    whole = {**message, "content": [part]}
    finished = {"id": "resp_1", "status": "completed", "output": [whole]}
    if not body["stream"]:
        return json_response(finished)
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    delta = {**place, "type": "response.output_text.delta"}
    deltas = [
        {**delta, "delta": token, "logprobs": logprobs[index : index + 1]}
        for index, token in enumerate(TOKENS)
    ]
    item = {"output_index": 0, "item": message}
    return encode_events(
        [
            {"type": "response.created", "response": {"id": "resp_1", "output": []}},
            {**item, "type": "response.output_item.added"},
            *deltas,
            {**item, "type": "response.output_item.done", "item": whole},
            {"type": "response.completed", "response": finished},
        ]
    )


def _complete(body: dict[str, Any], logprobs: list[dict[str, Any]]) -> Response:
    """Return a completion; a stream sends the emoji after the token of its first byte, as OpenAI does."""
    if not body.get("stream"):
        message = {"role": "assistant", "content": "".join(TOKENS)}
        content = {"content": logprobs, "refusal": None} if logprobs else None
        choice = {"index": 0, "message": message, "logprobs": content, "finish_reason": "stop"}
        return json_response({"id": "c_1", "object": "chat.completion", "choices": [choice]})
    texts = [*TOKENS[:2], "", TOKENS[2] + TOKENS[3], *TOKENS[4:]]
    lists = [{"content": logprobs[at : at + 1], "refusal": None} for at in range(len(texts))]
    choices: list[dict[str, Any]] = [
        {"index": 0, "delta": {"content": text}, "logprobs": each}
        for text, each in zip(texts, lists, strict=True)
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


def read_text(response: Any) -> tuple[str, list[dict[str, Any]]]:
    """Return the text of a response, and its log probabilities."""
    ((part,),) = (item.content for item in response.output)
    return part.text, dump(part.logprobs)


def dump(logprobs: Any) -> list[dict[str, Any]]:
    """Return log probabilities as plain objects."""
    return [each.model_dump(exclude_unset=True) for each in logprobs or ()]


KINDS = pytest.mark.parametrize("kind", ["responses", "responses, stateless", "chat"])


@KINDS
def test_complete_response_has_them(kind: str) -> None:
    """They are in the text of the response, also when it is retrieved, and only if they were requested."""
    text = "".join(TOKENS)
    with open_client(kind) as client:
        response = ask(client, "Hi", include=[INCLUDE], top_logprobs=2)
        plain = ask(client, "Hi", include=[INCLUDE])
        retrieved = client.responses.retrieve(response.id)
        others = [ask(client, "Hi"), ask(client, "And?", response.id)]
    assert read_text(response) == read_text(retrieved) == (text, build_logprobs(TOKENS, 2))
    assert read_text(plain) == (text, build_logprobs(TOKENS, 0))
    assert [read_text(each) for each in others] == [(text, [])] * 2


@KINDS
def test_streamed_response_has_them_with_each_delta(kind: str) -> None:
    """Each delta has those of its tokens, and the end of the text has all of them."""
    with open_client(kind) as client:
        options: Any = {"include": [INCLUDE], "top_logprobs": 1, "stream": True}
        events: list[Any] = list(ask(client, "Hi", **options))
        without = list(ask(client, "Hi", stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == "".join(TOKENS)
    found = [each for event in deltas for each in dump(event.logprobs)]
    assert found == build_logprobs(TOKENS, 1)
    assert all("".join(each.token for each in event.logprobs) == event.delta for event in deltas)
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert dump(done.logprobs) == read_text(events[-1].response)[1] == found
    assert not any(e.logprobs for e in without if e.type == "response.output_text.delta")


def read_choices(client: OpenAI, stream: bool, **options: Any) -> list[dict[str, Any]]:
    messages: Any = [{"role": "user", "content": "Hi"}]
    create: Any = client.chat.completions.create
    answered = create(model="m", messages=messages, stream=stream, **options)
    choices = [chunk.choices[0] for chunk in (answered if stream else [answered])]
    return [each for choice in choices if choice.logprobs for each in dump(choice.logprobs.content)]


@KINDS
@pytest.mark.parametrize("stream", [False, True])
def test_chat_completion_has_them(kind: str, stream: bool) -> None:
    """A choice or its chunks have them; tokens behind a stop sequence are left out, not one with its beginning."""
    with open_client(kind) as client:
        found = read_choices(client, stream, logprobs=True, top_logprobs=2)
        assert found == build_logprobs(TOKENS, 2)
        assert read_choices(client, stream) == []
        for stop, kept in (("END", 5), (". E", 3), ("Zz", 6), ("s \U0001f600x", 6)):
            found = read_choices(client, stream, logprobs=True, stop=stop)
            assert found == build_logprobs(TOKENS[:kept], 0), stop


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
    with open_client(kind, make_guarded_model) as client:
        assert read_choices(client, stream, logprobs=True) == []
