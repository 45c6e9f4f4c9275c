"""Streams of the Chat Completions and Messages APIs: their variations, and what is read from them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.recorded_streams import (
    BERN,
    DECODERS,
    EXPECTED,
    PATHS,
    REASONING_TEXT,
    SIX,
    block_contents,
    block_text,
    decode,
    decode_outcome,
    make_decoder,
    normalize,
    read_bytes,
    split_messages,
)
from events.streams import assemble, encode_sse
from for_each import for_each
from kedge.events import (
    AnthropicDecoder,
    ChatDecoder,
    Outcome,
    ResponseStarted,
    StreamEvent,
    ToolCallStarted,
    Usage,
)
from kedge.turns import AssistantBlock, ToolCallBlock, assistant, reasoning, tool_call

MEMBERS = [
    "type",
    "index",
    "id",
    "delta",
    "message",
    "content",
    "content_block",
    "choices",
    "text",
    "thinking",
    "signature",
    "name",
    "input",
    "partial_json",
    "tool_calls",
    "function",
    "custom",
    "arguments",
    "usage",
    "error",
    "reasoning",
    "reasoning_content",
    "refusal",
    "finish_reason",
    "stop_reason",
    "stop_details",
    "citations",
    "data",
    "model",
    "created",
    "prompt_tokens",
    "input_tokens",
]


@for_each("name", [name for name in PATHS if name.startswith("anthropic/")])
@for_each("late", [False, True])
def test_repeated_content_block_start_is_ignored(name: str, late: bool) -> None:
    """A repeated start event neither finishes its content block nor starts another one."""
    messages: list[bytes] = []
    repeated = b""
    for message in split_messages(name):
        messages += [message, repeated]
        repeated = message if b'"content_block_start"' in message else b""
        if not late:
            messages.append(repeated)
            repeated = b""
    events = decode(name, *messages)
    assert normalize(events) == normalize(decode(name, read_bytes(name)))


def test_content_blocks_with_the_same_index_are_decoded() -> None:
    """Content blocks that all have the index 0 are decoded separately."""
    stream = read_bytes("anthropic/thinking_and_call")
    for index in (b"1", b"2"):
        stream = stream.replace(b'"index":' + index, b'"index":0')
    result = decode_outcome("anthropic/thinking_and_call", stream)
    assert list(result.blocks) == EXPECTED["anthropic/thinking_and_call"][1]


def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    """Return a chunk of a Chat Completions stream."""
    return {"id": "1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def decode_chunks(chunks: list[dict[str, Any]]) -> Outcome:
    """Decode and assemble chunks of a Chat Completions stream."""
    decoder = ChatDecoder()
    events = [event for each in chunks for event in decoder.feed_message(each)]
    return assemble([*events, *decoder.close()])


@for_each("name", ["chat/text", "chat/parallel_calls", "chat/deepseek"])
@for_each("member", ["delta", "message"])
@for_each("pieces", [1, 3])
def test_answer_repeated_after_the_finish_reason_is_ignored(
    name: str, member: str, pieces: int
) -> None:
    """Some servers repeat the message after the finish reason, complete or in pieces."""
    messages = split_messages(name)
    end = next(at for at, message in enumerate(messages) if b'"finish_reason":"' in message)
    calls = [
        {
            "index": at,
            "id": block.call_id,
            "function": {"name": block.name, "arguments": block.arguments},
        }
        for at, block in enumerate(EXPECTED[name][1])
        if isinstance(block, ToolCallBlock)
    ]
    text = next(block.text for block in EXPECTED[name][1] if isinstance(block, AssistantBlock))
    size = -(-len(text) // pieces)
    repeated = [text[at : at + size] for at in range(0, len(text), size)]
    for piece in reversed(repeated):
        delta = {"role": "assistant", "content": piece, "tool_calls": calls}
        choice = {"index": 0, member: delta, "finish_reason": "length"}
        messages.insert(end + 1, encode_sse([{"choices": [choice]}]))
    assert normalize(decode(name, *messages)) == normalize(decode(name, read_bytes(name)))


@for_each("texts", [["Hel", "lo"], ["ha", "ha", "ha!"], ["Hello", "", " Hello again"]])
@for_each("last", ["stop", "length"])
def test_text_after_the_finish_reason_that_continues_the_answer_is_read(
    texts: list[str], last: str
) -> None:
    """Some servers send a finish reason with every chunk; the last one counts."""
    reasons = ["stop"] * (len(texts) - 1) + [last]
    chunks = [chunk({"content": text}, reason) for text, reason in zip(texts, reasons, strict=True)]
    found = decode_chunks(chunks)
    assert [block_text(block) for block in found.blocks] == ["".join(texts)]
    assert found.status == ("completed" if last == "stop" else "incomplete")


def call_piece(arguments: str, name: str = "", **members: Any) -> dict[str, Any]:
    """Return a delta with a piece of a tool call."""
    function = {"name": name, "arguments": arguments} if name else {"arguments": arguments}
    return {"tool_calls": [{**members, "function": function}]}


def test_calls_of_a_server_with_a_finish_reason_in_every_chunk_are_read() -> None:
    """A call may continue, or start, after a finish reason."""
    pieces = [
        {"content": "Rolling."},
        call_piece("", "roll", index=0, id="c1"),
        call_piece('{"sides":', index=0),
        call_piece(" 6}", index=0),
        call_piece('{"sides": 20}', "roll", index=1, id="c2"),
    ]
    found = decode_chunks([chunk(piece, "tool_calls") for piece in pieces])
    assert found.completed
    assert list(found.blocks) == [
        assistant("Rolling."),
        tool_call("roll", '{"sides": 6}', call_id="c1"),
        tool_call("roll", '{"sides": 20}', call_id="c2"),
    ]


@pytest.mark.parametrize("members", [{"index": 0, "id": "c1"}, {"id": "c1"}, {"index": 0}, {}])
def test_call_repeated_in_pieces_after_the_finish_reason_is_ignored(
    members: dict[str, Any],
) -> None:
    """Pieces of a call that is complete do not extend it."""
    pieces = [call_piece("", "roll", **members), call_piece("{}", **members)]
    once = decode_chunks([*map(chunk, pieces), chunk({}, "tool_calls")])
    twice = decode_chunks([*map(chunk, pieces), chunk({}, "tool_calls"), *map(chunk, pieces)])
    (block,) = twice.blocks
    assert block_text(block) == block_text(once.blocks[0])
    assert twice.completed


@pytest.mark.parametrize(
    ("chunks", "status"),
    [
        ([chunk({"content": "Hello"})], "completed"),
        ([chunk(call_piece("{}", "roll", id="c1"))], "completed"),
        ([chunk(call_piece('{"sides":', "roll", id="c1"))], "cut"),
        ([{"id": "1", "choices": []}], "cut"),
        ([chunk({"content": "Hello"}), {"error": {"type": "invalid_request_error"}}], "failed"),
    ],
)
def test_end_marker_completes_an_answer_without_a_finish_reason(
    chunks: list[dict[str, Any]], status: str
) -> None:
    """Some servers send only ``[DONE]``; an answer that lacks something is not complete."""
    decoder = ChatDecoder()
    events = decoder.feed(encode_sse(chunks) + b"data: [DONE]\n\n")
    outcome = assemble([*events, *decoder.close()])
    assert outcome.status == status
    assert outcome.code == ("invalid_request_error" if status == "failed" else "")


def test_message_beside_an_empty_delta_is_not_read_twice() -> None:
    """Some servers send the complete message with the chunk that ends the stream."""
    ending = chunk({}, "stop")
    ending["choices"][0]["message"] = {"role": "assistant", "content": "Hello"}
    for started in ([chunk({"content": "Hel"}), chunk({"content": "lo"})], []):
        assert list(decode_chunks([*started, ending]).blocks) == [assistant("Hello")]


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        ("chat/text", Usage(12, 8, 6, 2, 18)),
        ("chat/deepseek", Usage(9, 4, 20, 12, 29)),
        ("chat/openrouter", Usage(9, 0, 20, 0, 29)),
        ("chat/no_done", None),
        ("anthropic/text", Usage(12, 5, 9, 2, 21, 3)),
    ],
)
def test_usage_is_read_from_every_format(name: str, usage: Usage | None) -> None:
    """Usage is read from a separate chunk, the last chunk or other member names, if there is any."""
    assert decode_outcome(name, read_bytes(name)).usage == usage


@for_each(
    ("name", "reason", "code"),
    [
        ("chat/length", "max_output_tokens", ""),
        ("chat/content_filter", "content_filter", ""),
        ("chat/error", "", "500"),
        ("chat/choice_error", "", "server_error"),
        ("anthropic/max_tokens", "max_output_tokens", ""),
        ("anthropic/pause_turn", "pause_turn", ""),
        ("anthropic/overloaded", "", "overloaded_error"),
    ],
)
def test_reasons_and_codes(name: str, reason: str, code: str) -> None:
    """Incomplete and failed answers have the same reasons and codes for all providers."""
    result = decode_outcome(name, read_bytes(name))
    assert (result.reason, result.code) == (reason, code)


def test_whole_blocks_of_an_incomplete_answer() -> None:
    """The last block is partial at a token limit, but not at a pause."""
    truncated = decode_outcome(
        "anthropic/max_tokens_in_call", read_bytes("anthropic/max_tokens_in_call")
    )
    assert truncated.whole_blocks == (assistant("Rolling."),)
    paused = decode_outcome("anthropic/pause_turn", read_bytes("anthropic/pause_turn"))
    assert paused.whole_blocks == paused.blocks


def test_provider_specific_members_are_stored_on_the_block() -> None:
    """Markers of redacted reasoning and citations are stored, so that they can be sent again."""
    redacted, encrypted, _ = decode_outcome(
        "anthropic/redacted", read_bytes("anthropic/redacted")
    ).blocks
    assert redacted.extra["item"] == {"anthropic": "redacted"}
    assert not encrypted.extra
    (block,) = decode_outcome("anthropic/citations", read_bytes("anthropic/citations")).blocks
    assert block.content[0].extra["citations"][0]["encrypted_index"] == "Eo8B"  # type: ignore[attr-defined]


WHOLE_RESPONSES: dict[str, dict[str, Any]] = {
    "chat/parallel_calls": {
        "id": "chatcmpl-1",
        "choices": [
            {
                "index": 0,
                "finish_reason": "tool_calls",
                "message": {
                    "role": "assistant",
                    "content": "Both.",
                    "refusal": None,
                    "tool_calls": [
                        {
                            "id": "call_alpha",
                            "type": "function",
                            "function": {"name": "get_weather", "arguments": BERN},
                        },
                        {
                            "id": "call_beta",
                            "type": "function",
                            "function": {"name": "get_time", "arguments": '{"zone":"CET"}'},
                        },
                    ],
                },
            }
        ],
    },
    "chat/deepseek": {
        "id": "1",
        "choices": [{"message": {"content": "It is 4", "reasoning_content": REASONING_TEXT}}],
    },
    "chat/length": {
        "id": "1",
        "choices": [{"message": {"content": "Once upon a"}, "finish_reason": "length"}],
    },
    "anthropic/thinking_and_call": {
        "id": "msg_1",
        "stop_reason": "tool_use",
        "content": [
            {"type": "thinking", "thinking": REASONING_TEXT, "signature": "EqQBCgIYAhIM1sig=="},
            {"type": "text", "text": "Let me see."},
            {
                "type": "tool_use",
                "id": "toolu_01A",
                "name": "get_weather",
                "input": {"city": "Zürich"},
            },
        ],
    },
    "anthropic/max_tokens": {
        "id": "msg_1",
        "stop_reason": "max_tokens",
        "content": [{"type": "text", "text": "Once upon a"}],
    },
    "anthropic/refusal_at_once": {"id": "msg_1", "stop_reason": "refusal", "content": []},
}


@for_each("name", WHOLE_RESPONSES)
def test_a_complete_answer_equals_its_stream(name: str) -> None:
    """Blocks and status are the same for a complete answer and its stream."""
    complete = assemble(make_decoder(name).feed_whole(WHOLE_RESPONSES[name]))
    streamed = decode_outcome(name, read_bytes(name))
    assert (complete.status, complete.reason) == (streamed.status, streamed.reason)
    assert block_contents(complete.blocks) == block_contents(streamed.blocks)
    assert block_contents(complete.whole_blocks) == block_contents(streamed.whole_blocks)


HALF = "\ud83d"
"""Half of a character, which a JSON parser returns for one escape of a pair."""
TOOL_USE = {"type": "tool_use", "id": f"call{HALF}", "name": f"roll{HALF}", "input": {"a": HALF}}
FUNCTION_CALL = {
    "id": f"call{HALF}",
    "function": {"name": f"roll{HALF}", "arguments": {"a": HALF}},
}
HALVES: dict[str, dict[str, Any]] = {
    "chat": {
        "choices": [
            {"message": {"content": f"text{HALF}", "tool_calls": [FUNCTION_CALL]}},
        ],
    },
    "anthropic": {"content": [{"type": "text", "text": f"text{HALF}"}, TOOL_USE]},
}


@pytest.mark.parametrize("api", HALVES)
def test_halves_of_characters_in_a_complete_answer_are_replaced(api: str) -> None:
    """Every text of a complete answer can be encoded; without ``repair`` the answer is read as it is."""
    response = {"id": f"id{HALF}", "model": f"model{HALF}", **HALVES[api]}
    outcome = assemble(make_decoder(api).feed_whole(response))
    assert outcome.completed
    assert (outcome.response_id, outcome.model) == ("id\ufffd", "model\ufffd")
    assert outcome.blocks == (
        assistant("text\ufffd"),
        tool_call("roll\ufffd", '{"a": "\ufffd"}', call_id="call\ufffd"),
    )
    [started, *_] = make_decoder(api).feed_whole(response, repair=False)
    assert isinstance(started, ResponseStarted)
    assert started.response_id == response["id"]


def test_halves_of_characters_in_an_anthropic_stream_are_replaced() -> None:
    """A stream may contain complete texts outside of its deltas, which are replaced there as well."""
    deltas = [
        {"type": "text_delta", "text": HALF},
        {"type": "text_delta", "text": "\ude00"},
        {"type": "citations_delta", "citation": {"type": "char_location", "cited_text": HALF}},
    ]
    text = {"type": "text", "text": ""}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": f"id{HALF}", "model": "m"}},
        {"type": "content_block_start", "index": 0, "content_block": TOOL_USE},
        {"type": "content_block_start", "index": 1, "content_block": text},
        *({"type": "content_block_delta", "index": 1, "delta": delta} for delta in deltas),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
        {"type": "message_stop"},
    ]
    outcome = decode_outcome("anthropic", encode_sse(events))
    assert outcome.completed
    assert outcome.response_id == "id\ufffd"
    assert [block.text for block in outcome.blocks] == ["", "\U0001f600"]


@pytest.mark.parametrize(
    "completion",
    [
        {"choices": []},
        {"choices": None, "usage": {"prompt_tokens": 3, "completion_tokens": 0}},
        {"choices": [{"index": 0, "message": None}]},
    ],
)
def test_completion_without_choices_is_a_failure(
    completion: dict[str, Any],
) -> None:
    """A completion without choices is a failure with a message."""
    outcome = assemble(ChatDecoder().feed_whole(completion))
    assert outcome.status == "failed"
    assert "without choices" in outcome.message
    stopped = {"choices": [{"message": {}, "finish_reason": "content_filter"}]}
    assert assemble(ChatDecoder().feed_whole(stopped)).reason == "content_filter"
    failed = {"choices": [], "error": {"message": "overloaded"}}
    assert assemble(ChatDecoder().feed_whole(failed)).message == "overloaded"


CALL_MEMBERS: dict[str, dict[str, Any]] = {
    "same id": {"id": "call_0"},
    "same id and index": {"id": "call_0", "index": 0},
    "same index": {"index": 0},
}


@for_each("form", ["complete", "one chunk", "several chunks"])
@for_each("shared", CALL_MEMBERS)
@for_each("as_text", [True, False])
def test_complete_calls_with_the_same_id_are_not_joined(
    form: str, shared: str, as_text: bool
) -> None:
    """Servers that number calls badly send each call completely: they remain calls of their own."""
    arguments: list[Any] = [{"sides": 6}, {"sides": 20}]
    calls = [
        {
            **CALL_MEMBERS[shared],
            "function": {"name": "roll", "arguments": json.dumps(each) if as_text else each},
        }
        for each in arguments
    ]
    decoder = ChatDecoder()
    if form == "complete":
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        events = decoder.feed_whole({"id": "1", "choices": [{"message": message}]})
    else:
        lists = [calls] if form == "one chunk" else [[call] for call in calls]
        chunks = [*(chunk({"tool_calls": each}) for each in lists), chunk({}, "tool_calls")]
        events = [event for each in chunks for event in decoder.feed_message(each)]
        events += decoder.close()
    outcome = assemble(events)
    assert outcome.completed
    call_blocks = [block for block in outcome.blocks if isinstance(block, ToolCallBlock)]
    assert [json.loads(call.arguments) for call in call_blocks] == arguments
    assert len({call.call_id for call in call_blocks}) == 2


def test_equal_calls_with_the_same_id_in_one_message_are_two_calls() -> None:
    """A list does not repeat a call, so two equal ones are two calls, also of a free-form tool."""
    for kind, member in (("function", "arguments"), ("custom", "input")):
        call = {"id": "call_0", kind: {"name": "roll", member: SIX}}
        message = {"content": None, "tool_calls": [call, call]}
        outcome = assemble(ChatDecoder().feed_whole({"id": "1", "choices": [{"message": message}]}))
        assert outcome.completed
        assert [getattr(block, "arguments", "") for block in outcome.blocks] == [SIX, SIX]


def test_a_complete_call_that_a_later_chunk_repeats_is_one_call() -> None:
    """A chunk with the same id, name and arguments adds nothing, and neither does a name alone."""
    call = {"index": 0, "id": "call_0", "function": {"name": "roll", "arguments": SIX}}
    named = {"index": 0, "id": "call_0", "function": {"name": "roll", "arguments": ""}}
    lists = ([call], [call], [named])
    chunks = [*(chunk({"tool_calls": each}) for each in lists), chunk({}, "tool_calls")]
    decoder = ChatDecoder()
    events = [event for each in chunks for event in decoder.feed_message(each)]
    assert list(assemble([*events, *decoder.close()]).blocks) == [
        tool_call("roll", SIX, call_id="call_0")
    ]


def test_pieces_of_one_call_that_repeat_its_name_are_joined() -> None:
    """Pieces with the same index, id and name belong to one call, also in the same chunk."""
    first, second = SIX[:5], SIX[5:]
    deltas = [
        {"index": 0, "id": "call_0", "function": {"name": "roll", "arguments": each}}
        for each in (first, second)
    ]
    for lists in ([deltas], [deltas[:1], deltas[1:]]):
        chunks = [*(chunk({"tool_calls": each}) for each in lists), chunk({}, "tool_calls")]
        decoder = ChatDecoder()
        events = [event for each in chunks for event in decoder.feed_message(each)]
        assert list(assemble([*events, *decoder.close()]).blocks) == [
            tool_call("roll", SIX, call_id="call_0")
        ]


NAME_PIECES: dict[str, list[dict[str, Any]]] = {
    "id once": [
        {"index": 0, "id": "call_0", "function": {"name": "get_", "arguments": ""}},
        {"index": 0, "function": {"name": "weather"}},
    ],
    "id repeated": [
        {"index": 0, "id": "call_0", "function": {"name": "get_"}},
        {"index": 0, "id": "call_0", "function": {"name": "weat"}},
        {"index": 0, "id": "call_0", "function": {"name": "her"}},
    ],
    "no index": [
        {"id": "call_0", "function": {"name": "get_"}},
        {"id": "call_0", "function": {"name": "weather"}},
    ],
    "growing": [
        {"index": 0, "id": "call_0", "function": {"name": "get_"}},
        {"index": 0, "function": {"name": "get_weather"}},
        {"index": 0, "function": {"name": "get_weather"}},
    ],
    "repeated": [
        {"index": 0, "id": "call_0", "function": {"name": "get_weather", "arguments": ""}},
        {"index": 0, "function": {"name": "get_weather", "arguments": ""}},
    ],
    "id late": [
        {"index": 0, "function": {"name": "get_weather"}},
        {"index": 0, "id": "call_0", "function": None},
    ],
}


@for_each("form", NAME_PIECES)
@for_each("arguments", ["", BERN])
def test_call_whose_name_arrives_in_pieces_is_one_call(form: str, arguments: str) -> None:
    """Some servers split the name of a call over chunks, others repeat it; it is announced complete."""
    pieces = [[each] for each in NAME_PIECES[form]]
    rest = [{**NAME_PIECES[form][-1], "function": {"arguments": arguments}}]
    other = [{"index": 1, "id": "call_1", "function": {"name": "flip", "arguments": "{}"}}]
    decoder, events = ChatDecoder(), list[StreamEvent]()
    for each in (*pieces, rest, other):
        events += decoder.feed_message(chunk({"tool_calls": each}))
    events += [*decoder.feed_message(chunk({}, "tool_calls")), *decoder.close()]
    started = [each for each in events if isinstance(each, ToolCallStarted)]
    assert [(each.name, each.call_id) for each in started] == [
        ("get_weather", "call_0"),
        ("flip", "call_1"),
    ]
    assert list(assemble(events).blocks) == [
        tool_call("get_weather", arguments or "{}", call_id="call_0"),
        tool_call("flip", "{}", call_id="call_1"),
    ]


def test_calls_without_arguments_in_one_list_are_not_joined() -> None:
    """Two names in one list are two calls, also if the server numbers both calls 0."""
    calls = [{"index": 0, "function": {"name": name}} for name in ("roll", "flip")]
    found = decode_chunks([chunk({"tool_calls": calls}), chunk({}, "tool_calls")])
    assert [getattr(block, "name", "") for block in found.blocks] == ["roll", "flip"]


@pytest.mark.parametrize(
    "stream",
    [
        b'data: {"object":"error","message":"too long","type":"BadRequestError","code":400}\n\n',
        b'event: error\ndata: {"message":"too long","code":400}\n\n',
    ],
    ids=["object", "event"],
)
def test_an_error_that_is_not_nested_is_read(stream: bytes) -> None:
    """Some servers of Chat Completions send the members of an error without ``error`` around them."""
    decoder = ChatDecoder()
    outcome = assemble([*decoder.feed(stream + b"data: [DONE]\n\n"), *decoder.close()])
    assert (outcome.status, outcome.code, outcome.message) == ("failed", "400", "too long")


@pytest.mark.parametrize("holder", ["chunk", "choice", "x_groq"])
def test_usage_of_a_chunk_is_read_from_every_position(holder: str) -> None:
    """Moonshot puts the counts into the choice and Groq into ``x_groq``; empty counts are none."""
    ending = chunk({}, "stop")
    counts = {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    if holder == "chunk":
        ending |= counts
    elif holder == "choice":
        ending["choices"][0] |= counts
    else:
        ending["x_groq"] = counts
    chunks = [chunk({"content": "Hi"}), ending, {"id": "1", "choices": [], "usage": {}}]
    assert decode_chunks(chunks).usage == Usage(3, 0, 2, 0, 5)


def test_blocks_without_a_start_are_read() -> None:
    """Some servers omit the start of text and reasoning, or the delta of the last event."""
    messages: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": "msg_1"}},
        content_block(0, "delta", delta={"type": "thinking_delta", "thinking": "Hm."}),
        content_block(1, "delta", delta={"type": "text_delta", "text": "Hel"}),
        content_block(1, "delta", delta={"type": "text_delta", "text": "lo"}),
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
        {"type": "message_delta", "usage": {"input_tokens": 3, "output_tokens": 2}},
        {"type": "message_stop"},
    ]
    decoder = AnthropicDecoder()
    found = assemble([event for each in messages for event in decoder.feed_message(each)])
    assert found.completed
    assert list(found.blocks) == [reasoning(text="Hm."), assistant("Hello")]
    assert found.usage == Usage(3, 0, 2, 0, 5)


def content_block(index: int, kind: str, **members: Any) -> dict[str, Any]:
    """Return an event of a content block."""
    return {"type": f"content_block_{kind}", "index": index, **members}


def test_content_blocks_that_overlap_are_complete() -> None:
    """A block that starts before another one is stopped does not cut off the other one."""
    blocks: list[dict[str, Any]] = [
        {"type": "text", "text": ""},
        *({"type": "tool_use", "id": each, "name": "roll", "input": {}} for each in ("t1", "t2")),
    ]
    deltas: list[dict[str, Any]] = [
        {"type": "text_delta", "text": "Rolling."},
        *({"type": "input_json_delta", "partial_json": each} for each in (SIX, BERN)),
    ]
    messages: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": "msg_1"}},
        *(content_block(at, "start", content_block=block) for at, block in enumerate(blocks)),
        *(content_block(at, "delta", delta=delta) for at, delta in enumerate(deltas)),
        *(content_block(at, "stop") for at in range(len(blocks))),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
        {"type": "message_stop"},
    ]
    decoder = AnthropicDecoder()
    outcome = assemble([event for each in messages for event in decoder.feed_message(each)])
    assert outcome.completed
    assert list(outcome.blocks) == [
        assistant("Rolling."),
        tool_call("roll", SIX, call_id="t1"),
        tool_call("roll", BERN, call_id="t2"),
    ]


@pytest.mark.parametrize(
    ("reason", "status"),
    [("STOP", "completed"), ("TOOL_CALLS", "completed"), ("LENGTH", "incomplete")],
)
def test_finish_reason_may_have_capital_letters(reason: str, status: str) -> None:
    """Some gateways pass on the finish reasons of Google's API."""
    decoder = ChatDecoder()
    events = decoder.feed_message(chunk({"content": "Yes."}, reason))
    assert assemble([*events, *decoder.close()]).status == status


def test_content_of_a_message_as_a_string_is_its_text() -> None:
    """Some gateways of Anthropic's API return the content as a string."""
    outcome = assemble(AnthropicDecoder().feed_whole({"id": "msg_1", "content": "It is 4."}))
    assert outcome.completed
    assert list(outcome.blocks) == [assistant("It is 4.")]


@pytest.mark.parametrize("api", ["chat", "anthropic"])
@given(st.binary(max_size=300) | st.text(max_size=300).map(lambda text: f"data: {text}".encode()))
def test_decoder_does_not_raise_for_any_bytes(api: str, stream: bytes) -> None:
    """Arbitrary bytes do not raise and do not complete a response."""
    decoder = DECODERS[api]()
    assert not assemble([*decoder.feed(stream), *decoder.close()]).completed


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 3) | st.sampled_from(["", "x", "stop", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(MEMBERS), inner, max_size=5)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("api", ["chat", "anthropic"])
@given(st.lists(st.dictionaries(st.sampled_from(MEMBERS), JSON, max_size=5), max_size=4))
def test_decoder_does_not_raise_for_any_message(api: str, messages: list[dict[str, Any]]) -> None:
    """Messages with known members of any value do not raise."""
    decoder = DECODERS[api]()
    events = [event for message in messages for event in decoder.feed_message(message)]
    assemble([*events, *decoder.close()])
    complete = {name: value for message in messages for name, value in message.items()}
    assemble(DECODERS[api]().feed_whole(complete))


@pytest.mark.parametrize("name", ["prompt_cache_hit_tokens", "num_cached_tokens", "cached_tokens"])
def test_cached_tokens_have_several_names(name: str) -> None:
    """DeepSeek, Mistral and others have names of their own for the cached tokens of a prompt."""
    counts = {"prompt_tokens": 100, "completion_tokens": 2, "total_tokens": 102, name: 64}
    choices = [{"index": 0, "finish_reason": "stop", "message": {"content": "Yes."}}]
    outcome = assemble(ChatDecoder().feed_whole({"choices": choices, "usage": counts}))
    assert outcome.usage == Usage(100, 64, 2, 0, 102)


def test_an_error_at_the_end_of_a_stream_has_usage() -> None:
    """OpenRouter sends the token counts with the error that ends a stream."""
    counts = {"prompt_tokens": 43, "completion_tokens": 10, "total_tokens": 53}
    piece = {"id": "g", "choices": [{"index": 0, "delta": {"content": "We"}}]}
    error = {"id": "g", "error": {"code": 400, "message": "Limit reached"}, "usage": counts}
    stream = "".join(f"data: {json.dumps(each)}\n\n" for each in (piece, error))
    decoder = ChatDecoder()
    outcome = assemble([*decoder.feed(stream.encode()), *decoder.close()])
    assert (outcome.status, outcome.message) == ("failed", "Limit reached")
    assert outcome.usage == Usage(43, 0, 10, 0, 53)
