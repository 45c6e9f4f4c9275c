"""Log probabilities of tokens are passed from a provider to the clients that request them."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
from openai import OpenAI
from starlette.requests import Request
from starlette.responses import Response

from engines.fake_server import json_response, serve_handler
from for_each import for_each
from kedge.middleware import guard, redact, with_middleware
from kedge.providers import connect
from kedge.server.engine_models import EngineModel
from kedge.testing import serve
from server.conftest import ask
from server.engine_models.conftest import connect_engine_model, open_client

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
def connect_upstream(kind: str) -> Generator[OpenAI]:
    """Yield a client of a server in front of a provider with log probabilities."""
    with serve_handler(answer) as url, connect_engine_model(kind, url) as client:
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
def test_response_has_them(kind: str) -> None:
    """They are in the text and its deltas, also when it is retrieved, and only if they were requested."""
    text = "".join(TOKENS)
    options = {"include": [INCLUDE], "top_logprobs": 2}
    with connect_upstream(kind) as client:
        whole = ask(client, "Hi", **options)
        events: list[Any] = list(ask(client, "Hi", **options, stream=True))
        retrieved = client.responses.retrieve(whole.id)
        plain = ask(client, "Hi", include=[INCLUDE])
        *_, last = without = list(ask(client, "Hi", stream=True))
        others = [last.response, ask(client, "Hi"), ask(client, "And?", whole.id)]
    streamed = events[-1].response
    expected = build_logprobs(TOKENS, 2)
    assert [read_text(each) for each in (whole, retrieved, streamed)] == [(text, expected)] * 3
    assert read_text(plain) == (text, build_logprobs(TOKENS, 0))
    assert [read_text(each) for each in others] == [(text, [])] * 3
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == text
    assert [each for event in deltas for each in dump(event.logprobs)] == expected
    assert all("".join(each.token for each in event.logprobs) == event.delta for event in deltas)
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert dump(done.logprobs) == expected
    assert not any(e.logprobs for e in without if e.type == "response.output_text.delta")


def read_choices(client: OpenAI, stream: bool, **options: Any) -> list[dict[str, Any]]:
    messages: Any = [{"role": "user", "content": "Hi"}]
    create: Any = client.chat.completions.create
    answered = create(model="m", messages=messages, stream=stream, **options)
    choices = [chunk.choices[0] for chunk in (answered if stream else [answered])]
    return [each for choice in choices if choice.logprobs for each in dump(choice.logprobs.content)]


@KINDS
@for_each("stream", [False, True])
def test_chat_completion_has_them(kind: str, stream: bool) -> None:
    """A choice or its chunks have them; tokens behind a stop sequence are left out, not one with its beginning."""
    with connect_upstream(kind) as client:
        found = read_choices(client, stream, logprobs=True, top_logprobs=2)
        assert found == build_logprobs(TOKENS, 2)
        assert read_choices(client, stream) == []
        for stop, kept in (("END", 5), (". E", 3), ("Zz", 6), ("s \U0001f600x", 6)):
            found = read_choices(client, stream, logprobs=True, stop=stop)
            assert found == build_logprobs(TOKENS[:kept], 0), stop


@for_each("kind", ["responses", "chat"])
def test_redacted_text_has_none(kind: str) -> None:
    """Tokens of a text that a guard changed are not shown."""
    with serve_handler(answer) as url:
        engine = connect(f"{kind}:{url}#practice", timeout=300)
        model = EngineModel("practice", with_middleware(engine, guard(redact("here"))))
        with serve(model=model) as front, open_client(front) as client:
            for stream in (False, True):
                assert read_choices(client, stream, logprobs=True) == []
