"""Test how AnthropicEngine renders a Turn and its parameters, and how it sends reasoning again."""

import base64
from typing import Any

import pytest

from engines.fake_server import (
    TURN,
    RecordingServer,
    catch_error,
    connect_to,
    continue_answer,
    json_response,
    serve_handler,
)
from engines.runs import collect_events
from for_each import for_each
from kedge import errors
from kedge.compaction.base import context_tokens
from kedge.engines import AnthropicEngine
from kedge.engines import Request as Asked
from kedge.engines.anthropic import (
    DEFAULT_MAX_TOKENS,
    PARAM_RULES,
    SAMPLING_RULES,
    map_tool,
    reconcile_body,
)
from kedge.engines.param_rules import map_params
from kedge.errors import AnswerIncomplete, UnsupportedBlock, UnsupportedParameter
from kedge.events import ResponseCompleted, Usage
from kedge.events.run import Healed
from kedge.planning import plan_request
from kedge.providers import connect
from kedge.testing import TestServer
from kedge.turns import (
    Block,
    FilePart,
    FrozenMap,
    ImagePart,
    OpaquePart,
    RefusalPart,
    TextPart,
    Turn,
    assistant,
    file,
    image,
    opaque,
    system,
    tool_call,
    tool_result,
    user,
)
from kedge.wire import AnthropicDecoder
from kedge.wire.anthropic_renderer import render_messages

COMPACTION = {"type": "compaction", "content": "Summary of everything.", "signature": "s"}
FREE_CALL = tool_call("f", "text", call_id="c", custom=True)
KEY = "sk-ant-planted-in-this-test"
REASONING = {"reasoning": {"effort": "low"}}
ANSWER = {
    "id": "msg_1",
    "type": "message",
    "content": [{"type": "text", "text": "Yes."}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 3, "output_tokens": 2},
}


def open_engine(url: str, model: str = "m", **settings: Any) -> AnthropicEngine:
    """Create an engine for the server at this address."""
    engine = connect(f"anthropic:{model}", base_url=url, api_key=KEY, max_retries=0, **settings)
    assert isinstance(engine, AnthropicEngine)
    return engine


def text_block(value: str) -> dict[str, Any]:
    """Return a text block."""
    return {"type": "text", "text": value}


def tool_use(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    """Return a tool call."""
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def render_blocks(*blocks: Block) -> list[dict[str, Any]]:
    """Return the messages for these blocks."""
    plan = plan_request(Turn(blocks), scope="anthropic", mode="stateless", now=0)
    return render_messages(plan, "anthropic")


def test_roles_alternate_and_results_come_first() -> None:
    """Consecutive blocks of one role are merged into one message, with tool results first."""
    assert render_blocks(
        system("Be kind."),
        user("Hello"),
        user("Are you there?"),
        assistant("Let me see."),
        tool_call("roll", '{"sides":6}', call_id="c1"),
        tool_call("now", "", call_id="c2"),
        user("Hurry"),
        tool_result("c1", "4"),
        tool_result("c2", "noon"),
        system("Be brief."),
        user("And?"),
        assistant("Four."),
        assistant([RefusalPart("No more.")]),
    ) == [
        {"role": "user", "content": [text_block("Hello"), text_block("Are you there?")]},
        {
            "role": "assistant",
            "content": [
                text_block("Let me see."),
                tool_use("c1", "roll", sides=6),
                tool_use("c2", "now"),
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "4"},
                {"type": "tool_result", "tool_use_id": "c2", "content": "noon"},
                text_block("Hurry"),
                text_block("And?"),
            ],
        },
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": [text_block("Four."), text_block("No more.")]},
    ]


def encode(media_type: str, data: bytes) -> dict[str, Any]:
    """Return the source of some data."""
    return {"type": "base64", "media_type": media_type, "data": base64.b64encode(data).decode()}


WORDS = {"type": "text", "media_type": "text/plain", "data": "words"}
SEARCH_RESULT = {"type": "search_result", "source": "s"}
PARTS: list[tuple[Any, dict[str, Any]]] = [
    ("Look:", text_block("Look:")),
    (
        image("https://x/y.png"),
        {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}},
    ),
    (image(b"png"), {"type": "image", "source": encode("image/png", b"png")}),
    (ImagePart(file_id="f1"), {"type": "image", "source": {"type": "file", "file_id": "f1"}}),
    (
        file(b"pdf", filename="a.pdf"),
        {"type": "document", "source": encode("application/pdf", b"pdf"), "title": "a.pdf"},
    ),
    (
        file(b"words", media_type="text/csv"),
        {"type": "document", "source": WORDS, "title": "file.csv"},
    ),
    (
        file("https://x/b.pdf"),
        {"type": "document", "source": {"type": "url", "url": "https://x/b.pdf"}},
    ),
    (FilePart(file_id="f2"), {"type": "document", "source": {"type": "file", "file_id": "f2"}}),
    (OpaquePart(FrozenMap(SEARCH_RESULT)), SEARCH_RESULT),
]


def test_images_and_files_become_blocks_also_in_results() -> None:
    """Images and files are sent by URL, by id or as data, and a text file as its text."""
    content = [part for part, _ in PARTS]
    expected = [rendered for _, rendered in PARTS]
    (message,) = render_blocks(user(content))
    assert message["content"] == expected
    call = tool_call("f", "{}", call_id="c")
    *_, received = render_blocks(user("x"), call, tool_result("c", content))
    assert received["content"][0]["content"] == expected


@for_each(
    ("blocks", "message"),
    [
        ([user([image(b"x", media_type="image/tiff")])], "an image of type image/tiff"),
        ([user([file(b"x", media_type="application/zip")])], "a file of type application/zip"),
        ([user([ImagePart("data:image/png,raw")])], "an image of type unknown"),
        ([user([OpaquePart(FrozenMap(type="input_audio"))])], "a part of another API"),
        ([user(" ")], "it is empty; give it text"),
        ([user("x"), opaque({"type": "web_search_call", "id": "w"})], "opaque web_search_call"),
        (
            [user("x"), opaque({"type": "compaction", "encrypted_content": "s"}), user("y")],
            "opaque compaction",
        ),
        (
            [user("x"), tool_call("f", "{oops", call_id="c"), tool_result("c", "1")],
            "its arguments are not a JSON object; correct the arguments",
        ),
        (
            [user("x"), FREE_CALL, tool_result("c", "1", custom=True)],
            "its arguments are not a JSON object",
        ),
        ([user([FilePart(data="data:text/plain;base64,!")])], "cannot be decoded"),
        ([user([FilePart(data="data:text/plain;base64,/w==")])], "cannot be decoded"),
        ([user("x"), assistant("y"), system("Now")], "it is not beside a user block; move it"),
    ],
)
def test_unsupported_content_names_the_block_and_what_to_do(
    blocks: list[Block], message: str
) -> None:
    """Content that the API does not support raises an error instead of being dropped."""
    with pytest.raises(UnsupportedBlock, match="before sending") as exc_info:
        render_blocks(*blocks)
    assert message in str(exc_info.value)
    assert any(block.id in str(exc_info.value) for block in blocks)


def test_unsupported_call_ids_are_replaced() -> None:
    """Call ids with invalid characters and call ids used twice are replaced by valid, unique ones."""
    blocks: list[Block] = [user("x")]
    for call_id in ("functions.f:0", "call_0", "call_0"):
        blocks += [tool_call("f", "{}", call_id=call_id), tool_result(call_id, "1")]
    parts = [part for each in render_blocks(*blocks) for part in each["content"]]
    reported = [part["id"] for part in parts if part["type"] == "tool_use"]
    received = [part["tool_use_id"] for part in parts if part["type"] == "tool_result"]
    assert reported == received
    assert len(set(reported)) == 3
    assert reported[1] == "call_0"
    assert all(name.replace("_", "").isalnum() for name in reported)


def test_api_specific_members_are_resent_unchanged() -> None:
    """Blocks of the provider's own tools, citations, and the caller of a tool are sent unchanged."""
    search = {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"q": "k"}}
    result = {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []}
    citations = {"citations": [{"type": "x", "encrypted_index": "i"}]}
    cited = TextPart("A kedge.", extra=FrozenMap(citations))
    caller = {"caller": {"type": "code_execution_20260120", "tool_id": "srv_0"}}
    call = tool_call("f", "{}", call_id="c", extra={"item": {"anthropic": caller}})
    _, reported, _ = render_blocks(
        user("x"), opaque(search), opaque(result), assistant([cited]), call, tool_result("c", "1")
    )
    assert reported["content"] == [
        search,
        result,
        {**text_block("A kedge."), **citations},
        {**tool_use("c", "f"), **caller},
    ]


def test_function_tools_are_translated_and_native_tools_unchanged() -> None:
    """Function tools are translated, native tools are sent unchanged, and free-form tools are rejected."""
    schema = {"type": "object", "properties": {}}
    definition = {"type": "function", "name": "f", "description": "d", "parameters": schema}
    expected = {"name": "f", "description": "d", "input_schema": schema}
    assert map_tool({**definition, "strict": False}) == expected
    assert map_tool({**definition, "strict": True}) == {**expected, "strict": True}
    assert map_tool({"type": "function", "name": "f"})["input_schema"] == {"type": "object"}
    native = {"type": "web_search_20260101", "name": "web_search"}
    assert map_tool(native) == native
    with pytest.raises(UnsupportedParameter, match="the free-form tool 'c'"):
        map_tool({"type": "custom", "name": "c"})


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@for_each(
    ("params", "expected"),
    [
        ({"max_output_tokens": 5}, {"max_tokens": 5}),
        ({"tool_choice": "auto"}, {"tool_choice": {"type": "auto"}}),
        ({"tool_choice": "required"}, {"tool_choice": {"type": "any"}}),
        (
            {"tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False},
            {"tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True}},
        ),
        (
            {"parallel_tool_calls": False},
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        ),
        ({"parallel_tool_calls": True}, {}),
        (
            {
                "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
                "reasoning": {"effort": "minimal"},
            },
            {
                "output_config": {
                    "format": {"type": "json_schema", "schema": {**SCHEMA, "additionalProperties": False}},
                    "effort": "low",
                },
                "thinking": {"type": "adaptive"},
            },
        ),
        ({"reasoning": {"effort": "none", "summary": "auto"}}, {"thinking": {"type": "disabled"}}),
        ({"reasoning": {"summary": "auto"}}, {"thinking": {"type": "adaptive", "display": "summarized"}}),
        (
            {"reasoning": {"budget_tokens": 2048}},
            {"thinking": {"type": "enabled", "budget_tokens": 2048}, "max_tokens": DEFAULT_MAX_TOKENS + 2048},
        ),
        ({"stop": "END"}, {"stop_sequences": ["END"]}),
        ({"stop": ["A", "B"]}, {"stop_sequences": ["A", "B"]}),
        ({"user": "u"}, {"metadata": {"user_id": "u"}}),
        ({"metadata": {"user_id": "u"}}, {"metadata": {"user_id": "u"}}),
        ({"temperature": 1, "top_p": 1.0, "store": False, "truncation": "disabled"}, {}),
        ({"service_tier": "auto", "tomorrow": {"x": 1}}, {"service_tier": "auto", "tomorrow": {"x": 1}}),
    ],
)  # fmt: skip
def test_common_parameters_are_translated(params: Any, expected: Any) -> None:
    """Parameters of the Responses API are translated, and unknown ones are sent unchanged."""
    body = reconcile_body({"tools": [{}], **map_params(params, {**PARAM_RULES, **SAMPLING_RULES})})
    assert {"max_tokens": DEFAULT_MAX_TOKENS, **expected} == {
        k: v for k, v in body.items() if k != "tools"
    }


def test_a_thinking_budget_above_the_limit_raises() -> None:
    """The API rejects it: the budget is part of what `max_output_tokens` limits."""
    params = {"reasoning": {"budget_tokens": 4096}, "max_output_tokens": 4096}
    with pytest.raises(UnsupportedParameter, match="must be smaller than max_output_tokens"):
        reconcile_body(map_params(params, PARAM_RULES))
    fits = {**params, "max_output_tokens": 4097}
    assert reconcile_body(map_params(fits, PARAM_RULES))["max_tokens"] == 4097


@for_each(
    ("params", "param"),
    [
        ({"temperature": 0}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"metadata": {"a": "b"}}, "metadata.a"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format 'json_object'"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice 'allowed_tools'"),
        ({"store": True}, "store"),
        ({"top_logprobs": 3}, "top_logprobs"),
    ],
)
def test_unsupported_parameter_raises(params: Any, param: str) -> None:
    """A parameter without an equivalent raises an error, because dropping it would change the answer."""
    with pytest.raises(UnsupportedParameter) as exc_info:
        map_params(params, {**PARAM_RULES, **SAMPLING_RULES})
    assert exc_info.value.param == param


def test_older_api_version_accepts_sampling_parameters() -> None:
    """With the header of an older API version, sampling parameters are sent."""
    engine = open_engine("http://h", default_headers={"Anthropic-Version": "2023-06-01"})
    body = engine._build_body(engine.plan(TURN), Asked(), {"temperature": 0})
    assert body["temperature"] == 0


async def test_a_request_has_model_system_messages_tools_and_limits() -> None:
    """A request always has a token limit, because the API requires one."""
    server = RecordingServer(json_response(ANSWER))
    async with connect_to(server.handle, "anthropic", params={"max_output_tokens": 9}) as engine:
        tools = ({"type": "function", "name": "f", "parameters": SCHEMA},)
        turn = await engine.run(Turn([system("Be kind."), user("Hello")]), tools=tools)
        await engine.run(turn.append(user("Go on")), model="other", tool_choice="auto")
    first, second = server.bodies
    assert first == {
        "model": "m",
        "system": "Be kind.",
        "messages": [{"role": "user", "content": [text_block("Hello")]}],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "max_tokens": 9,
    }
    assert second["model"] == "other"
    assert "tool_choice" not in second
    assert [each["role"] for each in second["messages"]] == ["user", "assistant", "user"]
    assert set(server.paths) == {"/v1/messages"}


def error_body(kind: str, message: str) -> dict[str, Any]:
    """Return an error in the form of this API."""
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}


@for_each(
    ("status", "kind", "expected"),
    [
        (400, "invalid_request_error", errors.RequestRefused),
        (401, "authentication_error", errors.NotAuthorized),
        (403, "permission_error", errors.NotAuthorized),
        (404, "not_found_error", errors.RequestRefused),
        (413, "request_too_large", errors.RequestRefused),
        (429, "rate_limit_error", errors.RateLimited),
        (500, "api_error", errors.ServerFailed),
        (529, "overloaded_error", errors.ServerFailed),
    ],
)
async def test_http_errors_are_mapped_to_engine_errors(
    status: int, kind: str, expected: type[errors.EngineError]
) -> None:
    """An error has its class, status, code, request id and retry delay, and never the key."""
    rejected = json_response(error_body(kind, f"no, {KEY}"), status)
    rejected.headers["request-id"] = "req_1"
    rejected.headers["retry-after"] = "7"
    error = await catch_error(expected, rejected, api="anthropic", api_key=KEY)
    assert (error.status, error.code, error.request_id) == (status, kind, "req_1")
    assert error.provider == "anthropic"
    assert error.retry_after == (7 if status in (429, 500, 529) else None)
    assert KEY not in str(error)
    if status == 404:
        assert "is 'm' a model of this server" in str(error)


def reasoning_parts(request: Any) -> list[dict[str, Any]]:
    """Return the reasoning parts of a request."""
    parts = [part for each in request.body["messages"] for part in each["content"]]
    return [part for part in parts if part["type"] in ("thinking", "redacted_thinking")]


async def test_reasoning_of_another_account_is_not_sent(server: TestServer) -> None:
    """A signature is valid only for the account that created it."""
    async with open_engine(server.url, "practice", params=REASONING) as engine:
        turn = (await engine.run(Turn([user("What is 2+3?")]))).append(user("Sure?"))
    async with open_engine(server.url, "practice", scope="another") as other:
        assert turn.blocks[1] in other.plan(turn).left_out
        await other.run(turn)
    assert reasoning_parts(server.requests[-1]) == []


async def test_a_rejected_signature_is_healed_once_without_reasoning(server: TestServer) -> None:
    """When the server rejects a signature, the Turn is sent without reasoning, and an event reports it."""
    async with open_engine(server.url, "practice", params=REASONING) as engine:
        turn = (await engine.run(Turn([user("What is 2+3?")]))).append(user("Sure?"))
    message = "messages.1.content.0: Invalid `signature` in `thinking` block"
    rejected = json_response(error_body("invalid_request_error", message), 400)
    other_server = RecordingServer(rejected, json_response(ANSWER))
    with serve_handler(other_server.handle) as url:
        async with open_engine(url, "practice", scope=engine.scope) as other:
            _, events = await collect_events(other, turn)
    assert Healed("reasoning") in events
    before, after = (
        [p["type"] for p in body["messages"][1]["content"]] for body in other_server.bodies
    )
    assert (before, after) == (["thinking", "text"], ["text"])


async def test_redacted_reasoning_and_tool_rounds_are_resent_in_order() -> None:
    """Two reasoning blocks before a tool call are sent again before that call."""
    content = [
        {"type": "redacted_thinking", "data": "sealed"},
        {"type": "thinking", "thinking": "", "signature": "sig"},
        tool_use("toolu_1", "f", a=1),
    ]
    answer = json_response({**ANSWER, "content": content, "stop_reason": "tool_use"})
    _, sent = await continue_answer(answer, tool_result("toolu_1", "done"), api="anthropic")
    assert sent["content"] == content


@for_each(
    ("reason", "content"),
    [
        ("pause_turn", [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}]),
        (
            "pause_turn",
            [{"type": "thinking", "thinking": "Hm", "signature": "s"}, text_block("So")],
        ),
        ("compaction", [COMPACTION]),
        ("reason_of_the_future", [COMPACTION]),
    ],
)
async def test_an_unfinished_answer_continues_from_the_turn_of_the_error(
    reason: str, content: list[Any]
) -> None:
    """The Turn of the error has everything in the answer, which the next request sends back unchanged."""
    paused = {**ANSWER, "content": content, "stop_reason": reason}
    server = serve_messages(paused, {**ANSWER, "id": "msg_2"})
    async with connect_to(server.handle, "anthropic") as engine:
        with pytest.raises(AnswerIncomplete) as exc_info:
            await engine.run(TURN)
        assert exc_info.value.code == reason
        assert exc_info.value.turn is not None
        turn = await engine.run(exc_info.value.turn.append(user("Go on")))
    sent = [block for each in server.bodies[1]["messages"] for block in each["content"]]
    for block in sent:
        block.pop("cache_control", None)
    # A compaction is where the request starts.
    start = [] if content == [COMPACTION] else [text_block("What is 2+3?")]
    assert sent == [*start, *content, text_block("Go on")]
    assert turn.blocks[-1] == assistant("Yes.")


async def test_tokens_are_counted_by_the_server(server: TestServer) -> None:
    """The count is of the same body that the request itself would send."""
    async with open_engine(server.url, "practice") as engine:
        turn = Turn([system("Be kind."), user("What is 2+3?")])
        counted = await engine.count_tokens(turn)
        async with engine.stream(turn) as stream:
            await stream.finish()
        assert counted == stream.usage.input_tokens
        assert counted < await engine.count_tokens(stream.turn) < counted + 25


def serve_messages(*messages: dict[str, Any]) -> RecordingServer:
    """Return a server that answers with these messages in order."""
    return RecordingServer(*map(json_response, messages))


MCP_CONTENT = [
    {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "ask", "server_name": "wiki", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1", "is_error": False, "content": []},
    {"type": "quantum_result", "id": "q_1", "value": 7},
]
"""Blocks of a hosted tool, and one of a type that does not exist yet."""


@pytest.mark.parametrize("other", ["responses", "chat"])
async def test_hosted_items_are_not_sent_to_another_api(other: str) -> None:
    """Another API has no such items, so the Turn is rejected before anything is sent, with what to do."""
    with serve_handler(serve_messages({**ANSWER, "content": MCP_CONTENT}).handle) as url:
        turn = await open_engine(url).run(TURN)
        engine = connect(f"{other}:{url}#m")
        with pytest.raises(UnsupportedBlock, match=r"mcp_tool_use.*remove it or write it as text"):
            await engine.run(turn.append(user("And?")))


async def test_usage_has_the_tokens_of_all_iterations() -> None:
    """Compactions and advisors are counted, and the size of the context is that after the last run."""
    counts = {"input_tokens": 100, "output_tokens": 20}
    iterations = [
        {"type": "compaction", "input_tokens": 50_000, "output_tokens": 900},
        {"type": "message", **counts, "cache_read_input_tokens": 80},
        {"type": "advisor_message", "input_tokens": 3_000, "output_tokens": 40, "model": "other"},
    ]
    usage = {**counts, "iterations": iterations}
    with serve_handler(serve_messages({**ANSWER, "usage": usage}).handle) as url:
        reply = await open_engine(url).ask(TURN)
    assert reply.usage == Usage(53_180, 80, 960, 0, 54_140)
    counted = AnthropicDecoder().feed_whole({**ANSWER, "usage": usage})[-1]
    assert isinstance(counted, ResponseCompleted)
    assert counted.usage is not None
    assert context_tokens(counted.usage) == 200
