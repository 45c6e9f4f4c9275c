"""Streams of the Chat Completions and Messages APIs: their variations, and what is read from them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from kedge.events import AnomalyNoted, Outcome, ResponseStarted, StreamEvent, ToolCallStarted, Usage
from kedge.turns import AssistantBlock, ToolCallBlock, assistant, reasoning, tool_call
from kedge.wire import AnthropicDecoder, ChatDecoder
from wire.recorded_streams import (
    BERN,
    DECODERS,
    EXPECTED,
    PATHS,
    SIX,
    Decoder,
    block_text,
    decode,
    decode_outcome,
    make_decoder,
    normalize,
    read_bytes,
    split_messages,
)
from wire.streams import assemble, encode_sse

MEMBERS = [
    *("type", "index", "id", "delta", "message", "content", "content_block", "choices", "text"),
    *("thinking", "signature", "name", "input", "partial_json", "tool_calls", "function", "custom"),
    *("arguments", "usage", "error", "reasoning", "reasoning_content", "refusal", "finish_reason"),
    *("stop_reason", "stop_details", "citations", "data", "model", "created", "prompt_tokens"),
    "input_tokens",
]


@for_each("name", [name for name in PATHS if name.startswith("anthropic/")])
@for_each("late", [False, True])
def test_repeated_content_block_start_is_ignored(name: str, late: bool) -> None:
    """A repeated start event neither finishes its content block nor starts another one."""
    messages: list[bytes] = []
    previous = b""
    for message in split_messages(name):
        repeated = message if b'"content_block_start"' in message else b""
        messages += [message, previous if late else repeated]
        previous = repeated
    assert normalize(decode(name, *messages)) == normalize(decode(name, read_bytes(name)))


def test_content_blocks_with_the_same_index_are_decoded() -> None:
    """Content blocks that all have the index 0 are decoded separately, and the start of one ends the one before."""
    stream = read_bytes("anthropic/thinking_and_call")
    for index in (b"1", b"2"):
        stream = stream.replace(b'"index":' + index, b'"index":0')
    result = decode_outcome("anthropic/thinking_and_call", stream)
    assert list(result.blocks) == EXPECTED["anthropic/thinking_and_call"][1]
    call = {"type": "tool_use", "id": "t1", "name": "roll", "input": {}}
    started = ({"type": "text", "text": "Rolling."}, call)  # of which neither is stopped
    cut = decode_messages(
        AnthropicDecoder(),
        MESSAGE_START,
        *(content_block(0, "start", content_block=block) for block in started),
        *message_end("max_tokens"),
    )
    assert cut.whole_blocks == (assistant("Rolling."),)
    texts = [
        content_block(0, kind, content_block={"type": "text", "text": ""}, delta=delta)
        for delta in ({"type": "text_delta", "text": text} for text in ("One", "Two"))
        for kind in ("start", "delta", "stop")
    ]
    found = decode_messages(AnthropicDecoder(), MESSAGE_START, *texts, *message_end("end_turn"))
    assert list(found.blocks) == [assistant("One"), assistant("Two")]


def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    """Return a chunk of a Chat Completions stream."""
    return {"id": "1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def call_chunk(*calls: dict[str, Any]) -> dict[str, Any]:
    """Return a chunk with these pieces of calls."""
    return chunk({"tool_calls": list(calls)})


def decode_messages(decoder: Decoder, *messages: dict[str, Any]) -> Outcome:
    """Decode and assemble the messages of a stream."""
    events = [event for each in messages for event in decoder.feed_message(each)]
    return assemble([*events, *decoder.close()])


def decode_chunks(*chunks: dict[str, Any]) -> Outcome:
    """Decode and assemble chunks of a Chat Completions stream."""
    return decode_messages(ChatDecoder(), *chunks)


CALLS_END = chunk({}, "tool_calls")


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
        call_delta(block.name, block.arguments, index=at, id=block.call_id)
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
@for_each("last", ["stop", "length", "STOP", "LENGTH"])
def test_text_after_the_finish_reason_that_continues_the_answer_is_read(
    texts: list[str], last: str
) -> None:
    """Some servers send a finish reason with every chunk, or in capitals; the last one counts."""
    reasons = ["stop"] * (len(texts) - 1) + [last]
    chunks = [chunk({"content": text}, reason) for text, reason in zip(texts, reasons, strict=True)]
    found = decode_chunks(*chunks)
    assert [block_text(block) for block in found.blocks] == ["".join(texts)]
    assert found.status == ("completed" if last.lower() == "stop" else "incomplete")


def call_delta(name: str | None, arguments: Any = None, **members: Any) -> dict[str, Any]:
    """Return a piece of a tool call; its function has no members that are None."""
    function = {"name": name, "arguments": arguments}
    return {**members, "function": {n: value for n, value in function.items() if value is not None}}


def test_calls_of_a_server_with_a_finish_reason_in_every_chunk_are_read() -> None:
    """A call may continue, or start, after a finish reason."""
    calls = [
        call_delta("roll", "", index=0, id="c1"),
        call_delta(None, '{"sides":', index=0),
        call_delta(None, " 6}", index=0),
        call_delta("roll", '{"sides": 20}', index=1, id="c2"),
    ]
    pieces: list[Any] = [{"content": "Rolling."}, *({"tool_calls": [call]} for call in calls)]
    found = decode_chunks(*(chunk(piece, "tool_calls") for piece in pieces))
    assert found.completed
    assert list(found.blocks) == [
        assistant("Rolling."),
        tool_call("roll", '{"sides": 6}', call_id="c1"),
        tool_call("roll", '{"sides": 20}', call_id="c2"),
    ]


@for_each("members", [{"index": 0, "id": "c1"}, {"id": "c1"}, {"index": 0}, {}])
def test_call_repeated_in_pieces_after_the_finish_reason_is_ignored(
    members: dict[str, Any],
) -> None:
    """Pieces of a call that is complete do not extend it."""
    pieces = [call_chunk(call_delta("roll", "", **members))]
    pieces.append(call_chunk(call_delta(None, "{}", **members)))
    once = decode_chunks(*pieces, CALLS_END)
    twice = decode_chunks(*pieces, CALLS_END, *pieces)
    (block,) = twice.blocks
    assert block_text(block) == block_text(once.blocks[0])
    assert twice.completed


@for_each(
    ("chunks", "status"),
    [
        ([chunk({"content": "Hello"})], "completed"),
        ([call_chunk(call_delta("roll", "{}", id="c1"))], "completed"),
        ([call_chunk(call_delta("roll", '{"sides":', id="c1"))], "cut"),
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
        assert list(decode_chunks(*started, ending).blocks) == [assistant("Hello")]


def test_only_the_first_choice_is_read_and_each_text_once() -> None:
    """Other choices are ignored, and so is reasoning that is repeated under another name."""
    other = chunk({"content": "No"})
    other["choices"][0]["index"] = 1
    both = chunk({"reasoning_content": "Hm.", "reasoning": "Hm."})
    found = decode_chunks(both, chunk({"content": "Yes"}), other, chunk({}, "stop"))
    assert list(found.blocks) == [reasoning(text="Hm."), assistant("Yes")]


@for_each(
    ("name", "reason", "code", "usage"),
    [
        ("chat/text", "", "", Usage(12, 8, 6, 2, 18)),
        ("chat/deepseek", "", "", Usage(9, 4, 20, 12, 29)),
        ("chat/openrouter", "", "", Usage(9, 0, 20, 0, 29)),
        ("chat/no_done", "", "", None),
        ("chat/length", "max_output_tokens", "", ...),
        ("chat/content_filter", "content_filter", "", ...),
        ("chat/error", "", "500", ...),
        ("chat/choice_error", "", "server_error", ...),
        ("anthropic/text", "", "", Usage(12, 5, 9, 2, 21, 3)),
        ("anthropic/max_tokens", "max_output_tokens", "", ...),
        ("anthropic/pause_turn", "pause_turn", "", ...),
        ("anthropic/overloaded", "", "overloaded_error", ...),
    ],
)
def test_reason_code_and_usage(name: str, reason: str, code: str, usage: Any) -> None:
    """Answers have the same reasons, codes and counts for all providers, wherever the stream has them."""
    result = decode_outcome(name, read_bytes(name))
    assert (result.reason, result.code) == (reason, code)
    assert usage in (result.usage, ...)


def test_whole_blocks_of_an_incomplete_answer() -> None:
    """Only the last block is partial at a token limit, and none at a pause."""
    truncated, paused = (
        decode_outcome(name, read_bytes(name))
        for name in ("anthropic/max_tokens_in_call", "anthropic/pause_turn")
    )
    assert truncated.whole_blocks == (assistant("Rolling."),)
    assert paused.whole_blocks == paused.blocks
    thought = {"reasoning": "Hm.", "reasoning_details": [{"index": 0, "signature": "s"}]}
    for deltas, whole in (([thought], ()), ([thought, {"content": "Yes"}], ("reasoning",))):
        found = decode_chunks(*map(chunk, deltas), chunk({}, "length"))
        assert tuple(block.kind for block in found.whole_blocks) == whole


def test_provider_specific_members_are_stored_on_the_block() -> None:
    """Markers of redacted reasoning and citations are stored, so that they can be sent again."""
    (redacted, encrypted, _), (cited,) = (
        decode_outcome(name, read_bytes(name)).blocks
        for name in ("anthropic/redacted", "anthropic/citations")
    )
    assert redacted.extra["item"] == {"anthropic": "redacted"}
    assert not encrypted.extra
    assert cited.content[0].extra["citations"][0]["encrypted_index"] == "Eo8B"  # type: ignore[attr-defined]


HALF = "\ud83d"
"""Half of a character, which a JSON parser returns for one escape of a pair."""
TOOL_USE = {"type": "tool_use", "id": f"call{HALF}", "name": f"roll{HALF}", "input": {"a": HALF}}
FUNCTION_CALL = {"id": f"call{HALF}", "function": {"name": f"roll{HALF}", "arguments": {"a": HALF}}}
HALVES: dict[str, dict[str, Any]] = {
    "chat": {"choices": [{"message": {"content": f"text{HALF}", "tool_calls": [FUNCTION_CALL]}}]},
    "anthropic": {"content": [{"type": "text", "text": f"text{HALF}"}, TOOL_USE]},
}


@for_each("api", HALVES)
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
    citation = {"type": "char_location", "cited_text": HALF}
    events = [
        {"type": "message_start", "message": {"id": f"id{HALF}", "model": "m"}},
        content_block(0, "start", content_block=TOOL_USE),
        content_block(1, "start", content_block={"type": "text", "text": ""}),
        content_block(1, "delta", delta={"type": "text_delta", "text": HALF}),
        content_block(1, "delta", delta={"type": "text_delta", "text": "\ude00"}),
        content_block(1, "delta", delta={"type": "citations_delta", "citation": citation}),
        *message_end("tool_use"),
    ]
    outcome = decode_outcome("anthropic", encode_sse(events))
    assert outcome.completed
    assert outcome.response_id == "id\ufffd"
    assert [block.text for block in outcome.blocks] == ["", "\U0001f600"]


@for_each(
    "completion",
    [
        {"choices": []},
        {"choices": None, "usage": {"prompt_tokens": 3, "completion_tokens": 0}},
        {"choices": [{"index": 0, "message": None}]},
    ],
)
def test_completion_without_choices_is_a_failure(completion: dict[str, Any]) -> None:
    """A completion without choices is a failure with a message."""
    outcome = assemble(ChatDecoder().feed_whole(completion))
    assert outcome.status == "failed"
    assert "without choices" in outcome.message
    stopped = {"choices": [{"message": {}, "finish_reason": "content_filter"}]}
    assert assemble(ChatDecoder().feed_whole(stopped)).reason == "content_filter"
    failed = {"choices": [], "error": {"message": "overloaded"}}
    assert assemble(ChatDecoder().feed_whole(failed)).message == "overloaded"


@for_each("choices", [7, "x", [{"delta": 7}], [{"index": 0, "delta": []}]])
def test_a_chunk_with_invalid_choices_is_reported(choices: Any) -> None:
    """A chunk whose choices are no array, or whose delta is no object, is an anomaly."""
    events = ChatDecoder().feed_message({"id": "1", "choices": choices})
    assert [each.kind for each in events if isinstance(each, AnomalyNoted)] == ["malformed"]


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
    texts = [json.dumps(each) if as_text else each for each in arguments]
    calls = [call_delta("roll", each, **CALL_MEMBERS[shared]) for each in texts]
    if form == "complete":
        outcome = decode_calls(*calls)
    else:
        lists = [calls] if form == "one chunk" else [[call] for call in calls]
        outcome = decode_chunks(*(call_chunk(*each) for each in lists), CALLS_END)
    assert outcome.completed
    call_blocks = [block for block in outcome.blocks if isinstance(block, ToolCallBlock)]
    assert [json.loads(call.arguments) for call in call_blocks] == arguments
    assert len({call.call_id for call in call_blocks}) == 2


def decode_calls(*calls: dict[str, Any]) -> Outcome:
    """Decode and assemble a complete message with these calls."""
    message = {"role": "assistant", "content": None, "tool_calls": list(calls)}
    return assemble(ChatDecoder().feed_whole({"id": "1", "choices": [{"message": message}]}))


def test_equal_calls_with_the_same_id_in_one_message_are_two_calls() -> None:
    """A list does not repeat a call, so two equal ones are two calls, also of a free-form tool."""
    for kind, member in (("function", "arguments"), ("custom", "input")):
        outcome = decode_calls(*[{"id": "call_0", kind: {"name": "roll", member: SIX}}] * 2)
        assert outcome.completed
        assert [getattr(block, "arguments", "") for block in outcome.blocks] == [SIX, SIX]


def test_pieces_of_one_call_that_repeat_its_members_are_one_call() -> None:
    """A piece may repeat id, name and arguments, or only the name, which add nothing; others are joined."""
    whole, named, first, second = (
        call_delta("roll", arguments, index=0, id="call_0")
        for arguments in (SIX, "", SIX[:5], SIX[5:])
    )
    for lists in ([[whole], [whole], [named]], [[first, second]], [[first], [second]]):
        outcome = decode_chunks(*(call_chunk(*each) for each in lists), CALLS_END)
        assert list(outcome.blocks) == [tool_call("roll", SIX, call_id="call_0")]


FIRST: dict[str, Any] = {"index": 0, "id": "call_0"}
NAME_PIECES: dict[str, list[dict[str, Any]]] = {
    "id once": [call_delta("get_", "", **FIRST), call_delta("weather", index=0)],
    "id repeated": [call_delta(name, **FIRST) for name in ("get_", "weat", "her")],
    "no index": [call_delta(name, id="call_0") for name in ("get_", "weather")],
    "growing": [call_delta("get_", **FIRST), *[call_delta("get_weather", index=0)] * 2],
    "repeated": [call_delta("get_weather", "", **FIRST), call_delta("get_weather", "", index=0)],
    "id late": [call_delta("get_weather", index=0), {**FIRST, "function": None}],
}


@for_each("form", NAME_PIECES)
@for_each("arguments", ["", BERN])
def test_call_whose_name_arrives_in_pieces_is_one_call(form: str, arguments: str) -> None:
    """Some servers split the name of a call over chunks, others repeat it; it is announced complete."""
    pieces = NAME_PIECES[form]
    rest = {**pieces[-1], "function": {"arguments": arguments}}
    other = call_delta("flip", "{}", index=1, id="call_1")
    decoder = ChatDecoder()
    events = list[StreamEvent]()
    for each in (*map(call_chunk, (*pieces, rest, other)), CALLS_END):
        events += decoder.feed_message(each)
    events += decoder.close()
    started = [(each.name, each.call_id) for each in events if isinstance(each, ToolCallStarted)]
    assert started == [("get_weather", "call_0"), ("flip", "call_1")]
    assert list(assemble(events).blocks) == [
        tool_call("get_weather", arguments or "{}", call_id="call_0"),
        tool_call("flip", "{}", call_id="call_1"),
    ]


def test_calls_without_arguments_in_one_list_are_not_joined() -> None:
    """Two names in one list are two calls, also if the server numbers both calls 0."""
    calls = [call_delta(name, index=0) for name in ("roll", "flip")]
    found = decode_chunks(call_chunk(*calls), CALLS_END)
    assert [getattr(block, "name", "") for block in found.blocks] == ["roll", "flip"]


@for_each(
    "stream",
    [
        b'data: {"object":"error","message":"too long","type":"BadRequestError","code":400}\n\n',
        b'event: error\ndata: {"message":"too long","code":400}\n\n',
    ],
)
def test_an_error_that_is_not_nested_is_read(stream: bytes) -> None:
    """Some servers of Chat Completions send the members of an error without ``error`` around them."""
    outcome = decode_outcome("chat", stream + b"data: [DONE]\n\n")
    assert (outcome.status, outcome.code, outcome.message) == ("failed", "400", "too long")


@for_each("holder", ["chunk", "choice", "x_groq"])
@for_each("cached", ["prompt_cache_hit_tokens", "num_cached_tokens", "cached_tokens"])
def test_usage_is_read_from_every_position_and_name(holder: str, cached: str) -> None:
    """Moonshot puts the counts into the choice, Groq into ``x_groq``, others name one differently; {} is none."""
    ending = chunk({}, "stop")
    counts = {"usage": {"prompt_tokens": 3, "completion_tokens": 2, cached: 1}}
    if holder == "chunk":
        ending |= counts
    elif holder == "choice":
        ending["choices"][0] |= counts
    else:
        ending["x_groq"] = counts
    empty = {"id": "1", "choices": [], "usage": {}}
    assert decode_chunks(chunk({"content": "Hi"}), ending, empty).usage == Usage(3, 1, 2, 0, 5)


def content_block(index: int, kind: str, **members: Any) -> dict[str, Any]:
    """Return an event of a content block."""
    return {"type": f"content_block_{kind}", "index": index, **members}


def message_end(reason: str) -> list[dict[str, Any]]:
    """Return the last events of a message."""
    return [{"type": "message_delta", "delta": {"stop_reason": reason}}, {"type": "message_stop"}]


MESSAGE_START = {"type": "message_start", "message": {"id": "msg_1"}}


def test_blocks_without_a_start_are_read() -> None:
    """Some servers omit the start of text and reasoning, or the delta of the last event."""
    delta, stop = message_end("end_turn")
    found = decode_messages(
        AnthropicDecoder(),
        MESSAGE_START,
        content_block(0, "delta", delta={"type": "thinking_delta", "thinking": "Hm."}),
        content_block(1, "delta", delta={"type": "text_delta", "text": "Hel"}),
        content_block(1, "delta", delta={"type": "text_delta", "text": "lo"}),
        delta,
        {"type": "message_delta", "usage": {"input_tokens": 3, "output_tokens": 2}},
        stop,
    )
    assert found.completed
    assert list(found.blocks) == [reasoning(text="Hm."), assistant("Hello")]
    assert found.usage == Usage(3, 0, 2, 0, 5)


def test_a_second_message_is_not_added_to_the_first() -> None:
    """A gateway that begins another message before the end of the first gives no complete answer of both."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    piece = {"type": "input_json_delta", "partial_json": '{"at": "He'}
    second = {"type": "message_start", "message": {"id": "msg_2"}}
    text = {"type": "text", "text": "Hello"}
    found = decode_messages(
        AnthropicDecoder(),
        MESSAGE_START,
        content_block(0, "start", content_block=call),
        content_block(0, "delta", delta=piece),
        second,
        content_block(0, "start", content_block=text),
        content_block(0, "stop"),
        *message_end("end_turn"),
    )
    assert (found.status, found.response_id) == ("failed", "msg_1")
    assert "Hello" not in str(found.blocks)


def test_a_repeated_start_of_a_message_is_ignored() -> None:
    """The same message may be announced twice."""
    delta = content_block(0, "delta", delta={"type": "text_delta", "text": "Hello"})
    end = message_end("end_turn")
    found = decode_messages(AnthropicDecoder(), MESSAGE_START, MESSAGE_START, delta, *end)
    assert found.completed
    assert list(found.blocks) == [assistant("Hello")]


@for_each(("ends", "status"), [([content_block(0, "stop")], "completed"), ([], "incomplete")])
def test_a_refusal_inside_a_block_is_incomplete(ends: list[Any], status: str) -> None:
    """A refusal completes an answer only if all of its blocks have ended."""
    delta = content_block(0, "delta", delta={"type": "text_delta", "text": "I"})
    end = message_end("refusal")
    found = decode_messages(AnthropicDecoder(), MESSAGE_START, delta, *ends, *end)
    assert found.status == status


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
    outcome = decode_messages(
        AnthropicDecoder(),
        MESSAGE_START,
        *(content_block(at, "start", content_block=block) for at, block in enumerate(blocks)),
        *(content_block(at, "delta", delta=delta) for at, delta in enumerate(deltas)),
        *(content_block(at, "stop") for at in range(len(blocks))),
        *message_end("tool_use"),
    )
    assert outcome.completed
    assert list(outcome.blocks) == [
        assistant("Rolling."),
        tool_call("roll", SIX, call_id="t1"),
        tool_call("roll", BERN, call_id="t2"),
    ]


def test_content_of_a_message_as_a_string_is_its_text() -> None:
    """Some gateways of Anthropic's API return the content as a string."""
    outcome = assemble(AnthropicDecoder().feed_whole({"id": "msg_1", "content": "It is 4."}))
    assert outcome.completed
    assert list(outcome.blocks) == [assistant("It is 4.")]


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
    decode_messages(DECODERS[api](), *messages)
    complete = {name: value for message in messages for name, value in message.items()}
    assemble(DECODERS[api]().feed_whole(complete))


def test_an_error_at_the_end_of_a_stream_has_usage() -> None:
    """OpenRouter sends the token counts with the error that ends a stream."""
    counts = {"prompt_tokens": 43, "completion_tokens": 10, "total_tokens": 53}
    error = {"id": "1", "error": {"code": 400, "message": "Limit reached"}, "usage": counts}
    outcome = decode_chunks(chunk({"content": "We"}), error)
    assert (outcome.status, outcome.message) == ("failed", "Limit reached")
    assert outcome.usage == Usage(43, 0, 10, 0, 53)
