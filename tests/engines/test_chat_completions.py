"""Test how ChatCompletionsEngine renders a Turn and its parameters, and how it handles answers."""

import json
from typing import Any

import pytest
from starlette.responses import Response

from engines.fake_server import (
    TURN,
    RecordingServer,
    connect_to,
    continue_answer,
    json_response,
    make_handler,
    serve_handler,
)
from engines.runs import collect_events
from for_each import for_each
from kedge.engines import ChatCompletionsEngine, Engine, messages_from_blocks
from kedge.engines import Request as Asked
from kedge.engines.chat_completions import build_param_rules, map_tool
from kedge.engines.param_rules import map_params
from kedge.errors import RequestRefused, Unreachable, UnsupportedBlock, UnsupportedParameter
from kedge.events.run import Healed, ModeChanged
from kedge.planning import ConversationState, get_state, plan_request, set_state
from kedge.providers import connect
from kedge.turns import (
    AssistantBlock,
    Block,
    FilePart,
    FrozenMap,
    ImagePart,
    OpaquePart,
    RefusalPart,
    Turn,
    assistant,
    file,
    image,
    opaque,
    reasoning,
    system,
    tool_call,
    tool_result,
    user,
)
from kedge.wire import blocks_from_messages
from kedge.wire.chat_renderer import render_messages

AUDIO = {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}
OPEN = tool_call("f", "{}", call_id="c")
PNG = "data:image/png;base64,aGk="
ANSWER = {
    "id": "chatcmpl-1",
    "choices": [{"message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}


def function_call(name: str = "f", arguments: str = "{}", call_id: str = "c1") -> dict[str, Any]:
    """Return a call in a message."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def complete(message: dict[str, Any], reason: str = "stop") -> Response:
    """Return a completion with this message."""
    choices = [{"index": 0, "message": message, "finish_reason": reason}]
    return json_response({"id": "chatcmpl-2", "choices": choices})


def stream_deltas(*deltas: dict[str, Any], reason: str = "stop") -> Response:
    """Return a stream of these deltas."""
    choices: list[Any] = [{"index": 0, "delta": each} for each in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": reason})
    lines = (f"data: {json.dumps({'id': 'chatcmpl-1', 'choices': [each]})}\n\n" for each in choices)
    return Response("".join(lines) + "data: [DONE]\n\n", media_type="text/event-stream")


def render_blocks(*blocks: Block) -> list[dict[str, Any]]:
    """Return the messages for these blocks."""
    plan = plan_request(Turn(blocks), scope="chat", mode="stateless", now=0)
    return render_messages(plan, "chat")


def test_each_kind_of_block_becomes_a_message() -> None:
    """Text is a string, calls are in one message with the text before them, and results follow directly."""
    assert render_blocks(
        system("Be kind."),
        system("Be brief."),
        user("Hello"),
        assistant("Let me see."),
        tool_call("roll", '{"sides":6}', call_id="c1"),
        tool_call("apply", "patch", call_id="c2", custom=True),
        user("Hurry"),
        tool_result("c1", "4"),
        tool_result("c2", ["done", "and dusted"], custom=True),
        system("Now be long.", role="developer"),
        user("Go on"),
        assistant([RefusalPart("No.")]),
    ) == [
        {"role": "system", "content": "Be kind.\n\nBe brief."},
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                function_call("roll", '{"sides":6}'),
                {"id": "c2", "type": "custom", "custom": {"name": "apply", "input": "patch"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "tool", "tool_call_id": "c2", "content": '["done", "and dusted"]'},
        {"role": "user", "content": "Hurry"},
        {"role": "developer", "content": "Now be long."},
        {"role": "user", "content": "Go on"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]


def test_images_and_files_become_parts() -> None:
    """Images and files are sent by URL or as data, with a detail only if it is not the default."""
    parts = [
        "Look:",
        image("https://x/y.png"),
        image(b"hi", detail="low"),
        file(b"pdf", filename="a.pdf"),
        FilePart(file_id="file-1"),
        OpaquePart(FrozenMap(AUDIO)),
    ]
    data = {"file_data": "data:application/pdf;base64,cGRm", "filename": "a.pdf"}
    (message,) = render_blocks(user(parts))
    assert message["content"] == [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
        {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}},
        {"type": "file", "file": data},
        {"type": "file", "file": {"file_id": "file-1"}},
        AUDIO,
    ]


@for_each(
    ("blocks", "message"),
    [
        ([user([ImagePart(file_id="f")])], "pass the image data"),
        ([user([file("https://x/a.pdf")])], "pass the file data"),
        ([user([OpaquePart(FrozenMap(type="input_video"))])], "remove that part"),
        (
            [user("x"), OPEN, tool_result("c", [image(b"hi")])],
            "this API accepts only text in results; put it into a user block",
        ),
        ([user("x"), opaque({"type": "web_search_call", "id": "ws"})], "opaque web_search_call"),
        (
            [OPEN, user("x"), assistant("Meanwhile"), user("y"), tool_result("c", "1")],
            "the result of c comes later; move the result directly after its call",
        ),
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


def test_text_after_a_call_is_in_the_same_message() -> None:
    """Text and calls share one message, because two messages would separate a call from its result."""
    first, *_ = render_blocks(
        assistant("One"), tool_call("f", "{}", call_id="c"), assistant("Two"), tool_result("c", "1")
    )
    assert first["content"] == [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]
    assert len(first["tool_calls"]) == 1


def test_long_call_ids_are_shortened() -> None:
    """OpenAI accepts at most 40 characters here, so a call and its result are sent with a shorter id."""
    call_id = "c" * 64
    turn = Turn([tool_call("f", "{}", call_id=call_id), tool_result(call_id, "1")])
    plan = plan_request(turn, scope="chat", mode="stateless", now=0)
    reported, received = render_messages(plan, "chat", 40)
    assert reported["tool_calls"][0]["id"] == received["tool_call_id"]
    assert len(received["tool_call_id"]) <= 40


def test_empty_arguments_and_contents_are_sent_in_a_form_that_servers_accept() -> None:
    """A call without arguments has an empty object, a message without content an empty string."""
    call = tool_call("now", "", call_id="c1")
    rendered = render_blocks(user([]), call, tool_result("c1", ""))
    assert [message.get("content") for message in rendered] == ["", None, ""]
    assert rendered[1]["tool_calls"][0]["function"]["arguments"] == "{}"


def test_function_tools_are_translated_and_native_tools_unchanged() -> None:
    """Function and free-form tools of the Responses API are translated, and others are sent unchanged."""
    schema = {"type": "object", "properties": {}}
    function = {"name": "f", "description": "d", "parameters": schema}
    assert map_tool({"type": "function", **function, "strict": False}) == {
        "type": "function",
        "function": function,
    }
    assert map_tool({"type": "function", **function, "strict": True})["function"]["strict"] is True
    grammar = {"syntax": "lark", "definition": "start: A"}
    assert map_tool({"type": "custom", "name": "c", "format": {"type": "grammar", **grammar}}) == {
        "type": "custom",
        "custom": {"name": "c", "format": {"type": "grammar", "grammar": grammar}},
    }
    for native in ({"type": "function", "function": function}, {"type": "builtin", "x": 1}):
        assert map_tool(native) == native


NAMED = {"type": "function", "name": "f"}
NAMED_HERE = {"type": "function", "function": {"name": "f"}}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}
ALLOWED_HERE = {"mode": "auto", "tools": [NAMED_HERE]}
SCHEMA = {"name": "n", "schema": {"type": "object"}, "strict": True}


@for_each(
    ("params", "expected"),
    [
        (
            {"max_output_tokens": 5, "temperature": 0, "top_p": 0.5},
            {"max_tokens": 5, "temperature": 0, "top_p": 0.5},
        ),
        *(
            (params, params)
            for params in (
                {"tool_choice": "required"},
                {"parallel_tool_calls": False},
                {"stop": ["x"], "metadata": {"a": "b"}, "user": "u"},
                {"store": True},
                {"seed": 7, "tomorrow": {"x": 1}, "max_tokens": 3},
            )
        ),
        ({"tool_choice": NAMED}, {"tool_choice": NAMED_HERE}),
        (
            {"tool_choice": ALLOWED},
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED_HERE}},
        ),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {"verbosity": "low"}),
        (
            {"text": {"format": {"type": "json_object"}}},
            {"response_format": {"type": "json_object"}},
        ),
        (
            {"text": {"format": {"type": "json_schema", **SCHEMA}}},
            {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
        ),
        ({"reasoning": {"effort": "low", "summary": None}}, {"reasoning_effort": "low"}),
        ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"top_logprobs": 0}, {}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
        ({"store": False, "truncation": "disabled", "background": False, "include": []}, {}),
        ({"temperature": None}, {}),
    ],
)
def test_common_parameters_are_translated(params: Any, expected: Any) -> None:
    """Parameters of the Responses API are translated, and unknown ones are sent unchanged."""
    assert map_params(params, build_param_rules("max_tokens")) == expected


@for_each(
    ("params", "param"),
    [
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"reasoning": {"tomorrow": 1}}, "reasoning.tomorrow"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format 'grammar'"),
        ({"text": 7}, "text"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice 'file_search'"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
    ],
)
def test_unsupported_parameter_raises(params: Any, param: str) -> None:
    """A parameter without an equivalent raises an error, because dropping it would change the answer."""
    with pytest.raises(UnsupportedParameter) as exc_info:
        map_params(params, build_param_rules("max_tokens"))
    assert exc_info.value.param == param


async def run_once(engine: Engine, turn: Turn | None = None, **options: Any) -> Turn:
    """Run a Turn once and close the engine."""
    async with engine:
        return await engine.run(turn or Turn([user("Hello")]), **options)


async def test_a_request_has_model_messages_tools_and_parameters() -> None:
    """Parameters of the engine are sent with every request, and those of the request override them."""
    server = RecordingServer(json_response(ANSWER))
    async with connect_to(server.handle, "chat", params={"temperature": 1, "seed": 1}) as engine:
        tools = ({"type": "function", "name": "f", "parameters": {}},)
        for options in (
            {"temperature": 0, "tools": tools, "max_output_tokens": 9},
            {"streaming": True, "model": "other"},
            {"streaming": True, "stream_options": None},
            {"streaming": True, "stream_options": {"include_obfuscation": False}},
        ):
            await engine.run(Turn([user("Hello")]), **options)
    first, second, third, fourth = server.bodies
    assert first == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "temperature": 0,
        "seed": 1,
        "max_tokens": 9,
    }
    assert (second["model"], second["stream"]) == ("other", True)
    assert second["stream_options"] == {"include_usage": True}
    assert "stream_options" not in third
    assert fourth["stream_options"] == {"include_usage": True, "include_obfuscation": False}


async def test_openai_gets_the_newer_limit_parameter() -> None:
    """Newer OpenAI models reject the older name, and other servers do not know the newer one."""
    for address, name in (
        ("https://api.openai.com/v1", "max_completion_tokens"),
        ("http://127.0.0.1:1/v1", "max_tokens"),
    ):
        engine = connect(f"chat:{address}#m")
        assert isinstance(engine, ChatCompletionsEngine)
        plan = engine.plan(Turn([user("x")]))
        body = engine._build_body(plan, Asked(), {"max_output_tokens": 1})
        assert body[name] == 1


async def test_several_answers_are_rejected() -> None:
    """A request for several answers is rejected, because a Turn continues with one."""
    with pytest.raises(UnsupportedParameter, match="send it several times"):
        await run_once(connect("chat:http://127.0.0.1:1/v1#m"), n=2)


@for_each("mode", ["chained", "conversation"])
@for_each("is_setting", [False, True])
async def test_another_mode_than_stateless_is_reported_as_changed(
    mode: Any, is_setting: bool
) -> None:
    """A mode of a conversation or of all engines does not prevent a request, and an event reports the change."""
    settings = {"mode": mode} if is_setting else {}
    turn = Turn([user("x")])
    turn = turn if is_setting else set_state(turn, ConversationState(mode))
    async with connect_to(json_response(ANSWER), "chat", **settings) as engine:
        plan = engine.plan(turn)
        _, events = await collect_events(engine, turn)
    assert events[0] == ModeChanged("stateless", mode, "stateless_api")
    assert (plan.mode, plan.anchor, plan.delta) == ("stateless", None, turn.blocks)


async def test_an_unreachable_server_or_a_missing_model_has_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error is one line with the command that helps."""
    monkeypatch.setenv("OLLAMA_HOST", "127.0.0.1:1")
    with pytest.raises(Unreachable, match="start it with: ollama serve"):
        await run_once(connect("ollama:llama3.2", max_retries=0))
    received = {"error": {"message": 'model "llama3.2" not found, try pulling it first'}}
    with serve_handler(make_handler(lambda: json_response(received, 404))) as url:
        monkeypatch.setenv("OLLAMA_HOST", url.removesuffix("/v1"))
        with pytest.raises(
            RequestRefused, match=r"fetch it with: ollama pull llama3\.2"
        ) as exc_info:
            await run_once(connect("ollama:llama3.2"))
        assert "\n" not in str(exc_info.value)
        assert exc_info.value.status == 404
        with pytest.raises(RequestRefused, match="is 'm' a model of this server"):
            await run_once(connect(f"chat:{url}#m"))
    nowhere = "http://127.0.0.1:1"
    with pytest.raises(Unreachable, match="start the server"):
        await run_once(connect(f"chat:{nowhere}/v1#m", max_retries=0))
    with pytest.raises(Unreachable, match="correct ANTHROPIC_BASE_URL"):
        await run_once(connect("anthropic:m", base_url=nowhere, api_key="k", max_retries=0))


async def test_a_stateless_answer_is_recorded_without_an_anchor() -> None:
    """The record is marked as not stored, and the state of other servers is unchanged."""
    known = ConversationState(previous_response_id="resp_1", conversation_id="conv_1")
    async with connect_to(json_response(ANSWER), "chat") as engine:
        turn = await engine.run(set_state(Turn([user("x")]), known))
    state = get_state(turn)
    assert (state.previous_response_id, state.conversation_id) == ("resp_1", "conv_1")
    (record,) = state.anchors
    assert (record.response_id, record.stored, record.expires_at) == ("chatcmpl-1", False, None)


REASONING_ANSWER = complete(
    {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "I need the tool.",
        "tool_calls": [function_call()],
    },
    "tool_calls",
)


def refuse(message: str) -> Response:
    """Return a rejection with this message."""
    return json_response({"error": {"message": message}}, 400)


async def test_reasoning_is_resent_where_required_while_its_prefix_is_unchanged() -> None:
    """Reasoning is sent with its message; after an edit it is left out, and the plan reports it."""
    server = RecordingServer(REASONING_ANSWER, json_response(ANSWER))
    async with connect_to(server.handle, "chat", replay_reasoning=True) as engine:
        turn = (await engine.run(Turn([user("x")]))).append(tool_result("c1", "1"))
        assert engine.plan(turn).left_out == ()
        await engine.run(turn)
        edited = turn.edit(turn.blocks[0].id, user("y"))
        assert engine.plan(edited).left_out == (turn.blocks[1],)
        await engine.run(edited)
    _, second, third = (body["messages"] for body in server.bodies)
    assert second[1]["reasoning_content"] == "I need the tool."
    assert second[1]["content"] == "Let me see."
    assert len(second[1]["tool_calls"]) == 1
    assert "reasoning_content" not in third[1]


async def test_required_reasoning_is_sent_after_the_first_rejection() -> None:
    """DeepSeek and Kimi require reasoning between calls: the request is healed once, with an event."""
    rejected = refuse("Missing reasoning_content in the assistant message")
    server = RecordingServer(REASONING_ANSWER, rejected, rejected, json_response(ANSWER))
    async with connect_to(server.handle, "chat") as engine:
        turn = (await engine.run(Turn([user("x")]))).append(tool_result("c1", "1"))
        with pytest.raises(RequestRefused, match="Missing reasoning_content"):
            await engine.run(turn, heal=False)
        answer, events = await collect_events(engine, turn)
        await engine.run(answer.append(user("Go on")))
    assert Healed("reasoning") in events
    sent = ["reasoning_content" in str(body["messages"]) for body in server.bodies]
    assert sent == [False, False, False, True, True]


async def test_rejected_reasoning_is_left_out() -> None:
    """Older models reject reasoning, so it is left out; a second rejection is an error."""
    rejected = refuse("reasoning_content is not allowed in messages")
    server = RecordingServer(REASONING_ANSWER, rejected, json_response(ANSWER), rejected)
    async with connect_to(server.handle, "chat", replay_reasoning=True) as engine:
        turn = (await engine.run(Turn([user("x")]))).append(tool_result("c1", "1"))
        assert len(await engine.run(turn)) == 6
        with pytest.raises(RequestRefused, match="not allowed"):
            await engine.run(turn)
    assert "reasoning_content" not in str(server.bodies[2]["messages"])


def test_blocks_convert_to_messages_and_back() -> None:
    """``messages_from_blocks`` is the reverse of ``blocks_from_messages``; reasoning is left out."""
    turn = Turn(
        [
            system("Be brief."),
            user(["What is this?", image("https://example.com/cat.png", detail="low")]),
            reasoning("A cat.", encrypted_content="x"),
            assistant("I look it up."),
            tool_call("look_up", {"size": 1}, call_id="call_1"),
            tool_result("call_1", "a cat"),
            assistant("That is a cat."),
        ]
    )
    messages = messages_from_blocks(turn)
    roles = [message["role"] for message in messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    kept = [block for block in turn if block.kind != "reasoning"]
    assert blocks_from_messages(messages) == kept
    assert messages_from_blocks(kept) == messages


DETAILS = [
    {"type": "reasoning.text", "text": "Let me see.", "signature": "sig", "index": 0},
    {"type": "reasoning.encrypted", "data": "sealed", "id": "rs_1", "index": 1},
]
CITATION = {"type": "url_citation", "url_citation": {"url": "https://a.example", "title": "A"}}
SIGNED = {"google": {"thought_signature": "signed"}}
CALL = function_call()
NATIVE = {
    "role": "assistant",
    "content": "Yes.",
    "reasoning": "Let me see.",
    "reasoning_details": DETAILS,
    "annotations": [CITATION],
    "thought_signature": "signed",
    "executed_tools": [{"name": "search"}],
    "tool_calls": [{**CALL, "extra_content": SIGNED}],
}
"""A message with what only some servers have."""


FIRST, SECOND = DETAILS
NATIVE_DELTAS: list[dict[str, Any]] = [
    {"reasoning": "Let me", "reasoning_details": [{**FIRST, "text": "Let me", "signature": None}]},
    {"reasoning": " see.", "reasoning_details": [{**FIRST, "text": " see.", "signature": None}]},
    {"reasoning_details": [{**FIRST, "text": ""}]},
    {"reasoning_details": [SECOND]},
    {"content": "Yes.", "annotations": [CITATION]},
    {"thought_signature": "signed", "executed_tools": NATIVE["executed_tools"]},
    {"tool_calls": [{**CALL, "extra_content": SIGNED, "index": 0}]},
]
"""The message in small pieces, as OpenRouter sends it."""


async def continue_native(*, streaming: bool) -> tuple[Turn, Any]:
    """Return a Turn with the message, and the message as it was sent back."""
    streamed = stream_deltas(*NATIVE_DELTAS, reason="tool_calls")
    answer = streamed if streaming else complete(NATIVE, "tool_calls")
    return await continue_answer(answer, tool_result("c1", "done"), streaming=streaming)


@for_each("streaming", [False, True])
async def test_what_only_some_servers_send_is_sent_back(streaming: bool) -> None:
    """Citations, reasoning details and signatures are sent as they came; the log of hosted tools is not."""
    _, sent = await continue_native(streaming=streaming)
    ignored = ("reasoning", "executed_tools")
    assert sent == {name: value for name, value in NATIVE.items() if name not in ignored}


@for_each("streaming", [False, True])
async def test_what_only_some_servers_send_is_stored(streaming: bool) -> None:
    """The blocks are those of any server, with the members of this one beside them."""
    turn, _ = await continue_native(streaming=streaming)
    thought, message, call = turn.blocks[1:4]
    assert thought == reasoning(text="Let me see.", encrypted_content="sig")
    assert thought.extra["item"]["chat_message"] == {"reasoning_details": DETAILS}
    assert message == assistant("Yes.")
    assert isinstance(message, AssistantBlock)
    assert message.parts[0].extra["annotations"] == (CITATION,)
    assert message.extra["item"]["chat_message"]["executed_tools"] == ({"name": "search"},)
    assert (call, call.extra["item"]["chat_call"]) == (
        tool_call("f", "{}", call_id="c1"),
        {"extra_content": SIGNED},
    )


async def test_what_only_one_server_has_is_not_sent_to_another() -> None:
    """Another server, and an edited history, get the plain message: signatures would be rejected or wrong."""
    plain = {"role": "assistant", "content": "Yes.", "tool_calls": [CALL]}
    first, second = (RecordingServer(complete(NATIVE, "tool_calls")) for _ in range(2))
    async with (
        connect_to(first.handle, "chat") as engine,
        connect_to(second.handle, "chat") as other,
    ):
        turn = (await engine.run(TURN)).append(tool_result("c1", "done"))
        await other.run(turn)
        await engine.run(turn.edit(turn.blocks[0].id, user("Another question")))
    assert second.bodies[0]["messages"][1] == first.bodies[1]["messages"][1] == plain


async def test_a_signature_without_text_is_stored_with_the_call() -> None:
    """A message that consists of a call keeps the members of the message with the call."""
    message = {"role": "assistant", "extra_content": SIGNED, "tool_calls": [CALL]}
    _, sent = await continue_answer(complete(message, "tool_calls"), tool_result("c1", "done"))
    assert sent == message


async def test_audio_is_streamed_in_pieces() -> None:
    """The pieces of streamed audio are joined, and the next request refers to it by its id."""
    answer = stream_deltas(
        {"audio": {"id": "a", "transcript": "Hi"}},
        {"audio": {"id": "a", "data": "aG"}},
        {"audio": {"data": "k=", "transcript": "."}},
    )
    turn, sent = await continue_answer(answer, user("Again"), streaming=True)
    audio = turn.blocks[-1].extra["item"]["chat_message"]["audio"]
    assert audio == {"id": "a", "transcript": "Hi.", "data": "aGk="}
    assert sent["audio"] == {"id": "a"}


async def test_reasoning_details_after_the_answer_are_sent_back() -> None:
    """Gemini signs an answer at its end; the details then belong to the message, and are joined only by an index."""
    late = [{"type": "reasoning.encrypted", "data": each} for each in ("one", "two")]
    answer = stream_deltas({"content": "Yes."}, *({"reasoning_details": [each]} for each in late))
    _, sent = await continue_answer(answer, user("And?"), streaming=True)
    assert sent == {"role": "assistant", "content": "Yes.", "reasoning_details": late}
