"""Test every engine model with the official clients over real sockets, in front of a second Kedge server."""

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from starlette.requests import Request
from starlette.responses import Response

from anthropic_sdk import make_anthropic
from engines.fake_server import RecordingServer, json_response, serve_handler, sse_response
from for_each import for_each
from kedge.errors import describe_extra
from kedge.middleware import guard, redact, with_middleware
from kedge.providers import connect
from kedge.server.engine_models import EngineModel
from kedge.testing import TestServer, serve
from normalization import normalize_items
from server.conftest import ask, rejects, user_message
from server.engine_models.conftest import (
    connect_engine_model,
    make_model,
    open_client,
    serve_engine_model,
)
from server.test_users import make_users
from server.waiting import TIMEOUT, wait_until

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
ENCRYPTED_REASONING = "reasoning.encrypted_content"
TWO_CALLS = "call get_weather in Paris and get_weather in Rome"
IMAGE_URL = "data:image/png;base64,iVBORw0KGgo="


def last_context(upstream: TestServer) -> Any:
    """Return the context of the newest request to the upstream model."""
    return upstream.requests[-1].context


def complete(client: OpenAI, prompt: Any, *, streamed: bool = False, **options: Any) -> Any:
    """Return the complete response to a request, streamed or not."""
    answer = ask(client, prompt, **options, stream=streamed)
    return list(answer)[-1].response if streamed else answer


def find_calls(response: Any) -> list[Any]:
    return [item for item in response.output if item.type == "function_call"]


def answer_calls(response: Any, output: Any = "sunny") -> list[Any]:
    """Return the results of all calls of a response."""
    kind = "function_call_output"
    calls = find_calls(response)
    return [{"type": kind, "call_id": call.call_id, "output": output} for call in calls]


@for_each("streamed", [False, True])
@for_each("in_object", [False, True])
def test_stateless_engine_model_is_chained(
    client: OpenAI, upstream: TestServer, streamed: bool, in_object: bool
) -> None:
    """Responses are chained by id or in a conversation object, which this server stores, by every kind."""
    options: Any = {"conversation": client.conversations.create().id} if in_object else {}
    first = ask(client, "My name is Ada.", **options)
    options = options or {"previous_response_id": first.id}
    second = complete(client, "What did I say first?", streamed=streamed, **options)
    assert second.output_text == 'You said first: "My name is Ada."'
    assert second.usage.input_tokens > first.usage.input_tokens
    assert [item["role"] for item in last_context(upstream)] == ["user", "assistant", "user"]


@for_each("kind", ["chat", "responses"])
def test_guarded_answers_are_streamed_once(upstream: TestServer, kind: str) -> None:
    """A guarded engine streams the items that it returns without streaming, redacted."""
    engine = connect(f"{kind}:{upstream.base_url}#practice", timeout=300)
    model = EngineModel("any", with_middleware(engine, guard(redact("Oslo"))))
    options: Any = {"tools": [WEATHER], "reasoning": {"effort": "low"}}
    with (
        serve(model=model) as server,
        OpenAI(base_url=server.base_url, api_key="any") as client,
    ):
        for text in ("Say: to Oslo", "call get_weather in Rome", "Refuse to dance."):
            both = [complete(client, text, streamed=each, **options) for each in (True, False)]
            streamed, whole = ([_summarize(item) for item in each.output] for each in both)
            assert streamed == whole
            assert len(streamed) == 2
            assert "Oslo" not in str(streamed)


def _summarize(item: Any) -> tuple[Any, ...]:
    parts: list[Any] = getattr(item, "content", None) or []
    texts = [getattr(part, "refusal", "") or part.text for part in parts]
    return item.type, getattr(item, "arguments", ""), texts


def test_repeated_call_is_forwarded_once(client: OpenAI, upstream: TestServer) -> None:
    """Open WebUI chains on the response of a call and repeats the call; APIs reject two equal calls."""
    first = ask(client, "call get_weather in Paris", tools=[WEATHER])
    (call,) = find_calls(first)
    repeated = call.model_dump(include={"type", "call_id", "name", "arguments"})
    second = ask(client, [repeated, *answer_calls(first)], first.id, tools=[WEATHER])
    assert "sunny" in second.output_text
    kinds = [item.get("type") for item in last_context(upstream)]
    assert kinds.count("function_call") == 1


@for_each("streamed", [False, True])
def test_parallel_tool_calls(client: OpenAI, upstream: TestServer, streamed: bool) -> None:
    """Calls have the ids of the upstream model, and their results are matched to them."""
    options: Any = {"tools": [WEATHER], "reasoning": {"effort": "low"}, "streamed": streamed}
    first = complete(client, TWO_CALLS, **options)
    arguments = [json.loads(call.arguments) for call in find_calls(first)]
    assert arguments == [{"city": "Paris"}, {"city": "Rome"}]
    last = complete(client, answer_calls(first), previous_response_id=first.id, **options)
    assert last.output_text == "get_weather says: sunny. get_weather says: sunny."
    kinds = [item["type"] for item in last_context(upstream) if item["type"] != "reasoning"]
    assert kinds == ["message", *["function_call"] * 2, *["function_call_output"] * 2]


def test_answer_matches_its_schema(client: OpenAI) -> None:
    """The output format is sent upstream in the form of the upstream API."""
    schema = PARAMETERS | {"properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    form: Any = {"type": "json_schema", "name": "sum", "strict": True}
    form["schema"] = schema | {"additionalProperties": False}
    response = ask(client, "What is 6 * 7?", text={"format": form})
    assert json.loads(response.output_text) == {"answer": 42}


def test_every_part_of_a_message_is_sent(client: OpenAI, upstream: TestServer) -> None:
    """Codex sends its rules as a developer message of several parts; an image arrives unchanged."""
    rules = [{"type": "input_text", "text": text} for text in ("Be brief.", "Be kind.")]
    question = {"type": "input_text", "text": "What is this?"}
    image = {"type": "input_image", "image_url": IMAGE_URL, "detail": "low"}
    messages = [("developer", rules), ("user", [question, image])]
    ask(client, [{"type": "message", "role": role, "content": parts} for role, parts in messages])
    text, picture = last_context(upstream)[-1]["content"]
    assert (text, picture["image_url"]) == (question, IMAGE_URL)
    request_text = json.dumps(upstream.requests[-1].body)
    assert request_text.index("Be brief.") < request_text.index("Be kind.")


@for_each("texts", [[], ["A picture:"]])
def test_images_in_results_of_parallel_tools(
    client: OpenAI, upstream: TestServer, texts: list[str]
) -> None:
    """Agents read files this way; results of Chat Completions are text, so a message follows."""
    first = ask(client, TWO_CALLS, tools=[WEATHER])
    picture = {"type": "input_image", "image_url": IMAGE_URL}
    output = [*({"type": "input_text", "text": text} for text in texts), picture]
    ask(client, answer_calls(first, output), first.id, tools=[WEATHER])
    context_text = json.dumps([*last_context(upstream)])
    assert context_text.count(IMAGE_URL) == 2
    assert all(context_text.count(text) == 2 for text in texts)


@for_each("streamed", [False, True])
def test_truncated_answer_is_incomplete(client: OpenAI, streamed: bool) -> None:
    """An answer cut off by its token limit is incomplete and contains the text up to the limit."""
    response = complete(client, "Write 100 words", streamed=streamed, max_output_tokens=16)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    assert len(response.output[0].content[0].text.split()) >= 5


SAMPLING_PARAMS: Any = {"temperature": 0.5, "top_p": 0.25}
ACCOUNT_PARAMS = {
    "safety_identifier": "user-1",
    "prompt_cache_key": "key-1",
    "prompt_cache_retention": "24h",
    "service_tier": "default",
}
USER_PARAMS = {"user": "u", "service_tier": "default"}
ANTHROPIC_PARAMS = {"metadata": {"user_id": "user-1"}, "service_tier": "standard_only"}


def test_parameters_are_sent_upstream(
    kind: str, server: TestServer, client: OpenAI, upstream: TestServer
) -> None:
    """Every sampling or account parameter that the upstream API accepts is sent, under its name there."""
    is_anthropic = kind == "anthropic"
    more: Any = {**SAMPLING_PARAMS, **ACCOUNT_PARAMS}
    accepted = SAMPLING_PARAMS | (ANTHROPIC_PARAMS if is_anthropic else ACCOUNT_PARAMS)
    hello: Any = [user_message("Hello")]
    user: Any = {"user_id": "user-1" if is_anthropic else "u"}
    options: Any = {"max_tokens": 50, "metadata": user, "service_tier": "standard_only"}
    with make_anthropic(server.url) as other:
        for send, expected in (
            (lambda: ask(client, "Hello", **more), accepted),
            (lambda: client.chat.completions.create(model="any", messages=hello, **more), accepted),
            (
                lambda: other.messages.create(model="any", messages=hello, **options),
                ANTHROPIC_PARAMS if is_anthropic else USER_PARAMS,
            ),
        ):
            send()
            sent = upstream.requests[-1].body
            assert {name: sent.get(name) for name in expected} == expected
            assert not (is_anthropic and "prompt_cache_key" in sent)


def test_hosted_tools_are_sent_to_responses_apis_only(
    kind: str, client: OpenAI, upstream: TestServer
) -> None:
    """Agents offer web search to every model; a chat server would reject the request."""
    choice = {"type": "function", "name": "get_weather"}
    tools: Any = {"tools": [{"type": "web_search"}, WEATHER], "parallel_tool_calls": False}
    response = ask(client, "call get_weather in Rome", **tools, tool_choice=choice)
    assert [item.type for item in response.output] == ["function_call"]
    sent = upstream.requests[-1].body
    kinds = [tool.get("type", "function") for tool in sent["tools"]]
    assert kinds == (["web_search", "function"] if kind.startswith("responses") else ["function"])
    assert "get_weather" in str(sent["tool_choice"])
    one = sent.get("parallel_tool_calls") is False
    assert one or sent["tool_choice"]["disable_parallel_tool_use"]
    ask(client, "Hello", tools=[{"type": "web_search"}])
    assert kind.startswith("responses") or not upstream.requests[-1].body.get("tools")


SEARCH_CHOICE = {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search_preview"}}


@for_each(
    ("kind", "options", "param"),
    [
        ("anthropic", {"service_tier": "flex"}, "service_tier"),
        ("chat", {"max_tool_calls": 3}, "max_tool_calls"),
        ("chat", SEARCH_CHOICE, "tool_choice"),
        ("anthropic", SEARCH_CHOICE, "tool_choice"),
    ],
)
def test_unsupported_parameters_are_rejected(
    upstream: TestServer, kind: str, options: Any, param: str
) -> None:
    """A parameter or a required tool that the engine model cannot send is an error instead of being dropped."""
    with (
        connect_engine_model(kind, upstream.base_url) as client,
        rejects("unsupported_parameter", param),
    ):
        ask(client, "Hello", **options)


def test_a_long_context_is_compacted(client: OpenAI, upstream: TestServer) -> None:
    """The model summarizes the removed items, and the next response continues from the summary."""
    text = "The river runs from the mountains to the sea. " * 150
    first = ask(client, f"Remember this: {text}")
    compaction = [{"type": "compaction", "compact_threshold": 1000}]
    second = ask(client, "Line 2", first.id, context_management=compaction)
    assert [item.type for item in second.output] == ["compaction", "message"]
    assert "In summary:" in json.dumps(upstream.requests[-1].body)
    third = ask(client, "How many messages are there?", second.id)
    assert "In summary:" in json.dumps(upstream.requests[-1].body)
    assert "mountains" not in json.dumps(last_context(upstream)[1:])
    assert third.usage.input_tokens < first.usage.input_tokens


STATUSES = [
    ("status=429,retry_after=7", 429, "rate_limit_exceeded"),
    ("status=401", 502, "upstream_not_authorized"),
    ("status=404", 502, "upstream_not_found"),
    ("status=400", 400, "upstream_refused"),
    ("status=500", 502, "upstream_failed"),
    ("status=503", 503, "upstream_overloaded"),
    ("status=529", 503, "upstream_overloaded"),
]


@for_each("streamed", [False, True])
@for_each(("fault", "status", "code"), STATUSES)
def test_upstream_error_is_mapped(
    client: OpenAI, upstream: TestServer, fault: str, status: int, code: str, streamed: bool
) -> None:
    """An upstream error has a matching status and code, also for a streaming request."""
    upstream.faults.set(fault, times=1)
    with rejects(code) as exc_info:
        ask(client, "Hello", stream=streamed)
    assert exc_info.value.status_code == status
    assert status != 429 or exc_info.value.response.headers["retry-after"] == "7"
    assert ask(client, "Hello").output_text


@for_each("fault", ["cut_after_events=7", "cut_in_event=7", "fail_after_events=7"])
def test_broken_upstream_stream_fails_the_response(
    client: OpenAI, upstream: TestServer, fault: str
) -> None:
    """A response whose upstream stream breaks ends as failed and is stored as failed."""
    upstream.faults.set(fault, times=1)
    events: list[Any] = list(ask(client, "Write 40 words", stream=True))
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    failed = events[-1].response
    assert failed.error.code == "server_error"
    assert "behind this server" in failed.error.message
    retained = client.responses.retrieve(failed.id)
    assert (retained.status, retained.error) == ("failed", failed.error)
    assert ask(client, "Hello").output_text


@for_each("fault", ["slow_first_byte=0.05", "omit_call_id", "empty_call_id"])
def test_upstream_quirks_are_tolerated(client: OpenAI, upstream: TestServer, fault: str) -> None:
    """With a slow server or missing call ids, the answer is correct and calls can be answered."""
    upstream.faults.clear()
    upstream.faults.set(fault)
    response = complete(client, TWO_CALLS, tools=[WEATHER], streamed=True)
    calls = find_calls(response)
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Paris", "Rome"]
    last = ask(client, answer_calls(response), response.id, tools=[WEATHER])
    assert last.output_text.count("sunny") == 2


LLAMA_CPP = Path(__file__).parents[2] / "wire" / "transcripts" / "llama_cpp.sse"


def test_stream_without_output_indexes_is_emitted_once() -> None:
    """llama.cpp sends no `output_index`; each item is emitted and stored once, and calls can be answered."""
    replies = [
        Response(LLAMA_CPP.read_bytes(), media_type="text/event-stream"),
        json_response({"id": "resp_2", "status": "completed", "output": [MESSAGE]}),
    ]
    upstream = RecordingServer(*replies)
    with (
        serve_handler(upstream.handle) as url,
        connect_engine_model("responses, stateless", url) as client,
    ):
        events: list[Any] = list(ask(client, "Weather?", tools=[WEATHER], stream=True))
        response = events[-1].response
        added = [e.item.type for e in events if e.type == "response.output_item.added"]
        stored = client.responses.retrieve(response.id)
        kinds = ["reasoning", "message", "function_call", "function_call"]
        assert [item.type for item in stored.output] == added == kinds
        assert stored.output_text == "Let me look."
        arguments = [json.loads(call.arguments) for call in find_calls(response)]
        assert [each["city"] for each in arguments] == ["Bern", "Basel"]
        last = ask(client, answer_calls(response), response.id, tools=[WEATHER])
    assert last.output_text == TEXT["text"]
    sent = [item["type"] for item in upstream.bodies[1]["input"] if item["type"] != "reasoning"]
    assert sent == ["message"] * 2 + ["function_call"] * 2 + ["function_call_output"] * 2


def test_a_chat_and_a_message_reach_the_same_model(server: TestServer, client: OpenAI) -> None:
    """The stateless endpoints work with every kind of engine model, including reasoning and stop sequences."""
    question: Any = {"model": "any", "messages": [user_message("Think about 6 * 7")]}
    chat = client.chat.completions.create(**question, reasoning_effort="low")
    assert chat.choices[0].message.content == "6 * 7 = 42."
    count: Any = [user_message("one two three")]
    stopped = client.chat.completions.create(model="any", messages=count, stop="two")
    assert stopped.choices[0].message.content == 'You said: "one '
    thinking: Any = {"type": "adaptive"}
    with (
        make_anthropic(server.url) as other,
        other.messages.stream(**question, max_tokens=3000, thinking=thinking) as events,
    ):
        message: Any = events.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[1].text == "6 * 7 = 42."


def test_reasoning_can_be_requested_after_turns_without_it(upstream: TestServer) -> None:
    """A tool result can be sent with thinking enabled although the call came without reasoning."""
    tool: Any = {"name": "get_weather", "input_schema": PARAMETERS}
    messages: list[Any] = [user_message("call get_weather in Rome")]
    body: Any = {"model": "any", "max_tokens": 3000, "messages": messages, "tools": [tool]}
    with (
        serve_engine_model(upstream, "chat") as server,
        make_anthropic(server.url) as client,
    ):
        call: Any = client.messages.create(**body).content[0]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        called = {"role": "assistant", "content": [call.model_dump(exclude_none=True)]}
        messages += [called, {"role": "user", "content": [result]}]
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        last: Any = client.messages.create(**body, thinking=thinking)
    assert last.content[-1].text == "get_weather says: sunny."


def test_client_disconnect_cancels_upstream_request(
    client: OpenAI, server: TestServer, upstream: TestServer
) -> None:
    """When the client closes the stream of any API, the upstream model stops."""
    slow: Any = [user_message("Count to 5000, very slowly")]
    options: Any = {"model": "any", "messages": slow, "stream": True}
    with make_anthropic(server.url) as other:
        for open_stream in (
            lambda: ask(client, slow, stream=True, timeout=TIMEOUT),
            lambda: client.chat.completions.create(**options),
            lambda: other.messages.create(**options, max_tokens=5000),
        ):
            stream: Any = open_stream()
            next(
                each for each in stream if re.search(r'"(delta|content|text)": "\S', each.to_json())
            )
            assert upstream.running == 1
            stream.close()
            wait_until(lambda: upstream.running == 0)
    wait_until(lambda: server.running == 0)


def test_an_upstream_error_reaches_background_responses_and_websockets(
    client: OpenAI, upstream: TestServer
) -> None:
    """Both have the code of the error; unstored responses are chained within the connection before."""
    with client.responses.connect() as socket:

        def send(prompt: str, **more: Any) -> Any:
            socket.response.create(model="any", input=prompt, store=False, **more)
            return next(event for event in socket if event.type in ("response.completed", "error"))

        first = send("My name is Ada.").response
        second = send("What did I say first?", previous_response_id=first.id).response
        assert second.output_text == 'You said first: "My name is Ada."'
        upstream.faults.set("status=429,retry_after=3", times=2)
        rejected = send("Hello")
    assert (rejected.status, rejected.error.code) == (429, "rate_limit_exceeded")
    created = ask(client, "Hello", background=True)
    wait_until(lambda: client.responses.retrieve(created.id).status == "failed")
    failed: Any = client.responses.retrieve(created.id)
    assert failed.error.code == "rate_limit_exceeded"


def test_unreachable_upstream_is_reported(kind: str) -> None:
    """An unreachable upstream server is reported with status 503 and what to check."""
    with connect_engine_model(kind, "http://127.0.0.1:9/v1") as client:
        with pytest.raises(openai.InternalServerError, match="cannot be reached") as exc_info:
            ask(client, "Hello", stream=True)
        assert exc_info.value.status_code == 503


def test_a_stateful_server_is_chained_by_content(upstream: TestServer) -> None:
    """Only new items are sent upstream, although the client does not know the upstream response ids."""
    with connect_engine_model("responses", upstream.base_url) as client:
        first = ask(client, "One")
        for _ in range(2):  # a fork: both continue from the same response
            ask(client, "Two", first.id)
            sent = upstream.requests[-1].body
            assert len(sent["input"]) == 1
            assert sent["previous_response_id"] == upstream.requests[0].response_id
        answered = {"role": "assistant", "content": first.output_text}
        ask(client, [user_message("One"), answered, user_message("Three")])
        assert upstream.requests[-1].body["previous_response_id"]
        upstream.forget()
        healed = ask(client, "What did I say first?", first.id)
        assert healed.output_text == 'You said first: "One"'
        assert normalize_items(upstream.requests[-1].context)


def test_a_response_lost_upstream_is_not_tried_again(upstream: TestServer) -> None:
    """Once the upstream server rejected a response, other branches after it are sent in full at once."""
    with connect_engine_model("responses", upstream.base_url, trust="always") as client:
        first = ask(client, "One")
        upstream.forget()
        ask(client, "Two", first.id)
        count = len(upstream.requests)
        branch = ask(client, "What did I say first?", first.id)
        assert branch.output_text == 'You said first: "One"'
        assert len(upstream.requests) == count + 1


def test_users_do_not_continue_responses_of_each_other(upstream: TestServer) -> None:
    """The same history of another user is sent in full, and a user's own history is chained."""
    history = [user_message("One"), {"role": "assistant", "content": "You said: One"}]
    with make_users(model=make_model("responses", upstream.base_url)) as users:
        answer = users.create("alice", input="One")
        (text,) = answer["output"][0]["content"]
        history[1]["content"] = text["text"]
        anchors: dict[str, Any] = {}
        for name in ("bob", "alice"):
            users.create(name, input=[*history, user_message("Two")])
            anchors[name] = upstream.requests[-1].body.get("previous_response_id")
    assert anchors == {"bob": None, "alice": upstream.requests[0].response_id}


def test_an_anchor_is_found_behind_many_new_items(upstream: TestServer) -> None:
    """A request with more new items than one lookup has prefixes is chained on the last response."""
    with connect_engine_model("responses", upstream.base_url) as client:
        first = ask(client, "One")
        ask(client, [user_message(f"Note {number}") for number in range(100)], first.id)
        sent = upstream.requests[-1].body
        assert sent["previous_response_id"] == upstream.requests[0].response_id
        assert len(sent["input"]) == 100


@pytest.mark.parametrize("kind", ["anthropic", "responses, stateless"])
def test_reasoning_is_returned_to_its_model(upstream: TestServer, client: OpenAI) -> None:
    """Reasoning, encrypted by this server, is sent back upstream only if its context is unchanged."""
    options: Any = {"reasoning": {"effort": "low"}, "tools": [WEATHER]}

    def kinds() -> list[str]:
        return [item["type"] for item in last_context(upstream)]

    first = ask(client, "call get_weather in Rome", **options)
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    assert first.output[0].encrypted_content  # sent back later, so it is always included
    results = answer_calls(first)
    last = ask(client, results, first.id, **options)
    assert last.output_text == "get_weather says: sunny."
    assert kinds() == ["message", "reasoning", "function_call", "function_call_output"]
    items: list[Any] = [item.model_dump(exclude_none=True) for item in first.output]
    for city, is_sent in (("Rome", True), ("Oslo", False)):
        question = user_message(f"call get_weather in {city}")
        ask(client, [question, *items, *results], store=False, **options)
        assert ("reasoning" in kinds()) is is_sent


def test_reasoning_models_are_served_without_the_package_that_encrypts(
    upstream: TestServer, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it, encrypted reasoning is neither requested nor returned, which one warning says at the start."""
    options: Any = {"reasoning": {"effort": "low"}, "include": [ENCRYPTED_REASONING]}
    model = make_model(kind, upstream.base_url)
    with caplog.at_level("WARNING", "kedge"), serve(model=model, encrypts=False) as front:
        client = open_client(front)
        first = ask(client, "My name is Ada.", **options)
        second = ask(client, "One", first.id, **options)
        last = ask(client, "What is my name?", second.id, **options)
        with client.responses.stream(model="any", input="Hi", **options) as stream:
            streamed = stream.get_final_response()
        client.close()
    assert last.output_text == "Your name is Ada."
    for response in (first, second, last, streamed):
        reasoning = [item for item in response.output if item.type == "reasoning"]
        assert not any(item.encrypted_content for item in reasoning)
    for request in upstream.requests:
        assert ENCRYPTED_REASONING not in (request.body.get("include") or ())
    assert [record.message for record in caplog.records if "encrypted" in record.message] == [
        f"reasoning of models is neither requested nor returned in encrypted form: {describe_extra('encryption')}"
    ]


def test_reasoning_stored_with_the_package_is_ignored_without_it(
    upstream: TestServer, tmp_path: Path
) -> None:
    """A conversation whose reasoning was stored encrypted is continued without this reasoning."""
    options: Any = {"reasoning": {"effort": "low"}}
    db = str(tmp_path / "server.db")
    model = make_model("responses, stateless", upstream.base_url)
    with serve(model=model, db=db) as front, open_client(front) as client:
        first = ask(client, "My name is Ada.", **options)
    assert first.output[0].encrypted_content
    model = make_model("responses, stateless", upstream.base_url)
    with serve(model=model, db=db, encrypts=False) as front, open_client(front) as client:
        assert ask(client, "What is my name?", first.id).output_text == "Your name is Ada."
    assert [item["type"] for item in last_context(upstream)] == ["message"] * 3


def test_context_beyond_the_window_is_rejected(upstream: TestServer) -> None:
    """The context is limited by the window set for this model, counted in its own tokens."""
    with connect_engine_model("chat", upstream.base_url, window=600, tokens=2.0) as client:
        with rejects("context_length_exceeded"):
            ask(client, "many words here " * 120)
        assert ask(client, "many words here " * 50).output_text


def test_tools_in_the_input_are_sent_to_responses_apis_only(client: OpenAI, kind: str) -> None:
    """Codex sends tools as input items for known model names; other APIs reject them with advice."""
    item: Any = {"type": "additional_tools", "role": "developer", "tools": [WEATHER]}
    items = [item, user_message("Hi")]
    if kind.startswith("responses"):
        assert ask(client, items).output_text.startswith('You said: "Hi"')
        return
    with pytest.raises(openai.BadRequestError, match="send the tools as 'tools'") as exc_info:
        ask(client, items)
    assert exc_info.value.param == "input"


SEARCH = {
    "type": "web_search_call",
    "id": "ws_1",
    "status": "completed",
    "action": {"type": "search", "query": "weather", "sources": [{"type": "url", "url": "x"}]},
}
CITATION = {
    "type": "url_citation",
    "url": "https://weather.example",
    "title": "Weather",
    "start_index": 12,
    "end_index": 15,
}
TEXT: dict[str, Any] = {
    "type": "output_text",
    "text": "It is sunny [1].",
    "annotations": [CITATION],
}
MESSAGE = {"type": "message", "id": "msg_1", "role": "assistant", "content": [TEXT]}


async def answer_with_search(request: Request) -> Response:
    """Answer with a hosted search and a text that cites a page, streamed or not."""
    finished = {"id": "resp_1", "status": "completed", "output": [SEARCH, MESSAGE]}
    if not (await request.json())["stream"]:
        return json_response(finished)
    place = {"item_id": "msg_1", "output_index": 1, "content_index": 0}
    return sse_response(
        {"type": "response.created", "response": {"id": "resp_1", "output": []}},
        {"type": "response.output_item.added", "output_index": 0, "item": SEARCH},
        {"type": "response.output_item.done", "output_index": 0, "item": SEARCH},
        {
            "type": "response.output_item.added",
            "output_index": 1,
            "item": MESSAGE | {"content": []},
        },
        {**place, "type": "response.output_text.delta", "delta": TEXT["text"]},
        {"type": "response.output_item.done", "output_index": 1, "item": MESSAGE},
        {"type": "response.completed", "response": finished},
    )


def test_hosted_search_and_citations_are_passed_on() -> None:
    """Items of hosted tools keep their members and their place, and texts their citations, in the form of each API."""
    with (
        serve_handler(answer_with_search) as url,
        connect_engine_model("responses", url) as client,
    ):
        events = list(ask(client, "Is it sunny?", stream=True))
        added = [each for each in events if "annotation.added" in each.type]
        assert [(each.output_index, each.to_dict()["annotation"]) for each in added] == [
            (1, CITATION)
        ]
        for response in (events[-1].response, ask(client, "Is it sunny?")):
            search, message = (item.model_dump(exclude_unset=True) for item in response.output)
            assert search == SEARCH
            assert message["content"][0]["annotations"] == [CITATION]
            stored = client.responses.retrieve(response.id).output
            assert [item.type for item in stored] == ["web_search_call", "message"]
        question: Any = {"model": "m", "messages": [user_message("Is it sunny?")]}
        complete_chat = client.chat.completions.create(**question)
        streamed_chat = client.chat.completions.create(**question, stream=True)
        parts = [
            complete_chat.choices[0].message,
            *(each.choices[0].delta for each in streamed_chat),
        ]
    cited = {name: value for name, value in CITATION.items() if name != "type"}
    found = [each for part in parts for each in part.model_dump().get("annotations") or ()]
    assert found == [{"type": "url_citation", "url_citation": cited}] * 2
