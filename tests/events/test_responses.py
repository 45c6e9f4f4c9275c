"""The decoder of the Responses API: every type known or carried, nothing makes it raise."""

import json
import logging
import typing
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponsesServerEvent, ResponseStreamEvent

from events.streams import (
    Message,
    assemble,
    decode,
    encode_sse,
    read_messages,
    read_transcript,
    replay,
)
from kedge.errors import StreamTooLarge
from kedge.events import (
    AnomalyNoted,
    ItemStarted,
    OpaqueEvent,
    PartCompleted,
    RefusalDelta,
    ResponseCompleted,
    ResponseFailed,
    ResponseIncomplete,
    ResponsesDecoder,
    ResponseStarted,
    StreamFailed,
    TextDelta,
    Usage,
)
from kedge.events.responses import EVENT_READERS, OPAQUE_TYPES
from kedge.turns import tool_call

REFERENCE = [
    "response.created",
    "response.queued",
    "response.in_progress",
    "response.output_item.added",
    "response.output_item.done",
    "response.completed",
    "response.failed",
    "response.incomplete",
    "error",
    "response.content_part.added",
    "response.content_part.done",
    "response.output_text.delta",
    "response.output_text.annotation.added",
    "response.output_text.done",
    "response.refusal.delta",
    "response.refusal.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.custom_tool_call_input.delta",
    "response.custom_tool_call_input.done",
    "response.reasoning_summary_part.added",
    "response.reasoning_summary_part.done",
    "response.reasoning_summary_text.delta",
    "response.reasoning_summary_text.done",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.file_search_call.in_progress",
    "response.file_search_call.searching",
    "response.file_search_call.completed",
    "response.web_search_call.in_progress",
    "response.web_search_call.searching",
    "response.web_search_call.completed",
    "response.code_interpreter_call.in_progress",
    "response.code_interpreter_call.interpreting",
    "response.code_interpreter_call.completed",
    "response.code_interpreter_call_code.delta",
    "response.code_interpreter_call_code.done",
    "response.image_generation_call.in_progress",
    "response.image_generation_call.generating",
    "response.image_generation_call.partial_image",
    "response.image_generation_call.completed",
    "response.mcp_call.in_progress",
    "response.mcp_call.completed",
    "response.mcp_call.failed",
    "response.mcp_call_arguments.delta",
    "response.mcp_call_arguments.done",
    "response.mcp_list_tools.in_progress",
    "response.mcp_list_tools.completed",
    "response.mcp_list_tools.failed",
    "response.shell_call_command.added",
    "response.shell_call_command.delta",
    "response.shell_call_command.done",
    "response.shell_call_output_content.delta",
    "response.shell_call_output_content.done",
    "response.compaction.compacting",
    "response.audio.delta",
    "response.audio.done",
    "response.audio.transcript.delta",
    "response.audio.transcript.done",
]


def union_types(union: Any) -> set[str]:
    """The ``type`` of every member of a union of the SDK's event models."""
    arms = typing.get_args(typing.get_args(union)[0])
    fields = [arm.model_fields["type"].annotation for arm in arms]
    return {str(value) for field in fields for value in _literals(field)}


def _literals(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    return tuple(value for arm in typing.get_args(annotation) for value in _literals(arm))


def test_every_event_of_the_reference_and_of_the_sdk_is_known() -> None:
    """Read or carried: no documented type is news to us."""
    known = EVENT_READERS.keys() | OPAQUE_TYPES
    assert set(REFERENCE) <= known
    assert union_types(ResponseStreamEvent) <= known
    assert union_types(ResponsesServerEvent) <= known
    assert not EVENT_READERS.keys() & OPAQUE_TYPES


@pytest.mark.parametrize("kind", sorted(OPAQUE_TYPES))
def test_an_opaque_event_is_preserved(kind: str) -> None:
    """What we do not read we pass on as it came."""
    event = {"type": kind, "item_id": "x_1", "output_index": 0, "delta": "d", "more": [1, {}]}
    assert decode(encode_sse([event])) == [OpaqueEvent(kind, event)]


def test_an_unknown_type_is_carried_and_counted() -> None:
    """Tomorrow's event is no error today."""
    decoder = ResponsesDecoder()
    event = {"type": "response.telepathy.started", "mind": "yours"}
    assert decode(encode_sse([event]), decoder=decoder) == [OpaqueEvent(event["type"], event)]
    assert decoder.unknown == 1


def test_the_type_may_be_in_the_event_line_alone() -> None:
    """Servers that leave ``type`` out of the data are understood."""
    stream = b'event: response.output_text.delta\ndata: {"delta":"hi","output_index":0}\n\n'
    assert decode(stream) == [TextDelta("hi", "", 0, 0)]


def test_the_first_word_about_a_response_starts_it() -> None:
    """``queued`` or ``in_progress`` serve where ``created`` is missing; what follows is opaque."""
    response = {"id": "resp_1", "model": "m"}
    events = [
        {"type": f"response.{kind}", "response": response}
        for kind in ("queued", "in_progress", "created")
    ]
    found = decode(encode_sse(events))
    assert isinstance(found[0], ResponseStarted)
    assert found[0].response_id == "resp_1"
    assert [type(event) for event in found[1:]] == [OpaqueEvent, OpaqueEvent]


@pytest.mark.parametrize(
    ("response", "echo", "echoed"),
    [
        ({"previous_response_id": "resp_0"}, "resp_0", True),
        ({"previous_response_id": None}, None, True),
        ({}, None, False),
    ],
    ids=["remembered", "forgotten", "not said"],
)
def test_an_echoed_anchor_is_distinguished_from_a_missing_one(
    response: Message, echo: str | None, echoed: bool
) -> None:
    """A null is an answer; a missing member is none."""
    started = decode(encode_sse([{"type": "response.created", "response": response}]))[0]
    assert isinstance(started, ResponseStarted)
    assert (started.previous_response_id, started.echoed) == (echo, echoed)


def test_a_start_without_its_response_is_still_a_start() -> None:
    """Nothing is known of it, and nothing breaks."""
    assert decode(encode_sse([{"type": "response.created"}])) == [ResponseStarted()]


def test_the_start_of_an_item_has_its_type() -> None:
    """A watcher can say what the model is about."""
    events = decode(read_transcript("web_search"))
    assert [e for e in events if isinstance(e, ItemStarted)] == [
        ItemStarted("web_search_call", "ws_68a9aa", 0),
        ItemStarted("message", "msg_68a9bb", 1),
    ]


# Errors.


def test_a_flat_error_is_read() -> None:
    """As SSE sends it."""
    assert decode(read_transcript("error"))[-1] == StreamFailed(
        "rate_limit_exceeded", "Rate limit reached for gpt-5.6-mini."
    )


def test_a_nested_error_is_read() -> None:
    """As a WebSocket sends it."""
    message = {
        "type": "error",
        "status": 400,
        "error": {
            "type": "invalid_request_error",
            "code": "previous_response_not_found",
            "message": "Previous response with id 'resp_x' not found.",
            "param": "previous_response_id",
        },
    }
    assert ResponsesDecoder().feed_message(json.dumps(message)) == [
        StreamFailed(
            "previous_response_not_found",
            "Previous response with id 'resp_x' not found.",
            "previous_response_id",
            "invalid_request_error",
            400,
        )
    ]


@pytest.mark.parametrize(
    ("data", "failure"),
    [
        ({"error": {"message": "no", "code": 404}}, StreamFailed("404", "no")),
        ({"error": "broken"}, StreamFailed("", "broken")),
        ({"error": None, "type": "error"}, StreamFailed()),
        ({"type": "error"}, StreamFailed()),
    ],
    ids=["typeless", "a string", "null", "bare"],
)
def test_errors_in_odd_shapes_are_errors(data: Message, failure: StreamFailed) -> None:
    """However little a server says about it, an error ends in failure."""
    events = decode(encode_sse([data]))
    assert events == [failure]
    assert assemble(events).status == "failed"


def test_a_message_of_another_lane_is_passed_over() -> None:
    """On a shared WebSocket a decoder hears only its own stream, and what concerns all."""
    decoder = ResponsesDecoder(stream_id="a")
    words = {"type": "response.output_text.delta", "output_index": 0}
    assert decoder.feed_message({**words, "delta": "x", "stream_id": "b"}) == []
    assert decoder.feed_message({**words, "delta": "y", "stream_id": "a"}) == [
        TextDelta("y", "", 0)
    ]
    assert decoder.feed_message({"type": "error", "error": {"code": "gone"}}) == [
        StreamFailed("gone")
    ]


# The end of a response.


def response_event(kind: str, **response: Any) -> Message:
    return {"type": f"response.{kind}", "response": {"id": "resp_1", **response}}


@pytest.mark.parametrize(
    ("event", "kind", "detail"),
    [
        (response_event("completed", status="completed"), ResponseCompleted, ""),
        (response_event("completed"), ResponseCompleted, ""),
        (response_event("completed", status="incomplete"), ResponseIncomplete, ""),
        (response_event("completed", status="failed"), ResponseFailed, "failed"),
        (response_event("completed", status="cancelled"), ResponseFailed, "cancelled"),
        (response_event("completed", status="in_progress"), ResponseFailed, "status_mismatch"),
        (response_event("completed", status="tomorrow"), ResponseFailed, "status_mismatch"),
        (response_event("incomplete", status="completed"), ResponseIncomplete, ""),
        (
            response_event("incomplete", incomplete_details={"reason": "content_filter"}),
            ResponseIncomplete,
            "content_filter",
        ),
        (response_event("failed", status="completed"), ResponseFailed, "status_mismatch"),
        (response_event("failed", error={"code": "server_error"}), ResponseFailed, "server_error"),
        (response_event("failed", status="failed", error=None), ResponseFailed, "failed"),
        (response_event("cancelled", status="cancelled"), ResponseFailed, "cancelled"),
        (response_event("cancelled"), ResponseFailed, "cancelled"),
    ],
)
def test_the_worse_of_type_and_status_counts(event: Message, kind: type, detail: str) -> None:
    """An end that contradicts itself is never success."""
    found = decode(encode_sse([event]))[-1]
    assert type(found) is kind
    assert getattr(found, "code", getattr(found, "reason", "")) == detail
    assert assemble([found]).completed == (kind is ResponseCompleted)


def test_an_end_without_its_response_is_an_end() -> None:
    """The words of the stream are all there is, then, and the id of its start."""
    events = [
        {"type": "response.created", "response": {"id": "resp_1", "model": "m"}},
        {"type": "response.output_text.delta", "output_index": 0, "delta": "hi"},
        {"type": "response.completed"},
    ]
    result = assemble(decode(encode_sse(events)))
    assert (result.status, result.response_id, result.model) == ("completed", "resp_1", "m")


def test_nothing_counts_after_the_end() -> None:
    """Words that trail a finished response belong to nobody."""
    late = {"type": "response.output_text.delta", "output_index": 5, "delta": "ghost"}
    events = read_messages("text")
    decoder = ResponsesDecoder()
    assert decode(encode_sse([*events, late]), decoder=decoder) == decode(read_transcript("text"))
    assert decoder.ended


@pytest.mark.parametrize("usage", [None, 7, [], {"input_tokens": "many"}, {"input_tokens": -1}])
def test_usage_in_odd_shapes_breaks_nothing(usage: Any) -> None:
    """Tokens that cannot be read are no tokens."""
    found = decode(encode_sse([response_event("completed", usage=usage)]))[-1]
    assert isinstance(found, ResponseCompleted)
    assert found.usage in (None, Usage())


def test_a_total_that_is_missing_is_the_sum() -> None:
    """Servers that count in and out need not add."""
    found = decode(
        encode_sse([response_event("completed", usage={"input_tokens": 3, "output_tokens": 4})])
    )[-1]
    assert isinstance(found, ResponseCompleted)
    assert found.usage == Usage(3, 0, 4, 0, 7)


# Malformed events.


@pytest.mark.parametrize(
    "data",
    [
        "nonsense",
        '{"type":"response.output_text.delta"',
        "[]",
        "7",
        "{}",
        '{"type":7}',
        '{"type":"response.output_text.delta"}',
        '{"type":"response.output_text.delta","delta":7}',
        '{"type":"response.output_item.added"}',
        '{"type":"response.output_item.done","item":[]}',
        '{"type":"response.output_text.done"}',
        '{"type":"response.output_text.delta","delta":' + "1" * 5000 + "}",
        "[" * 100_000,
    ],
    ids=lambda data: data[:40],
)
def test_a_malformed_event_is_noted_and_survived(data: str) -> None:
    """The stream goes on, and finished items still make a whole response of it."""
    stream = read_transcript("text")
    first, _, rest = stream.partition(b"\n\n")
    decoder = ResponsesDecoder()
    broken = first + b"\n\ndata: " + data.encode() + b"\n\n" + rest
    events = decode(broken, decoder=decoder)
    assert [type(e) for e in events if isinstance(e, AnomalyNoted)] == [AnomalyNoted]
    assert decoder.malformed == 1
    assert [e for e in events if not isinstance(e, AnomalyNoted)] == decode(stream)
    assert assemble(events).completed


def test_a_malformed_event_fails_a_response_that_nothing_vouches_for() -> None:
    """If only deltas carry the words, a lost one may have been a word."""
    events = [*read_messages("plain_server")]
    events.insert(3, {"type": "response.output_text.delta", "output_index": 0, "delta": None})
    result = assemble(decode(encode_sse(events)))
    assert (result.status, result.code) == ("failed", "damaged_stream")
    assert "response.output_text.delta" in result.message


def test_names_that_look_like_content_are_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    """A secret in the place of a name stays out of the log."""
    secret = "sk-live secret words"
    caplog.set_level(logging.DEBUG)
    decode(encode_sse([{"type": secret, secret: 1}, {"type": 7, secret: secret}]))
    decode(f"event: response.{secret}\ndata: {secret}\n\n".encode())
    assert caplog.records
    assert "secret words" not in caplog.text


def test_no_more_than_a_few_names_are_listed() -> None:
    """A huge object does not fill the log."""
    event = {"type": "response.output_text.delta", **{f"m{n}": n for n in range(1000)}}
    (recorded,) = decode(encode_sse([event]))
    assert isinstance(recorded, AnomalyNoted)
    assert len(recorded.detail) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)
MEMBERS = ["item", "delta", "response", "item_id", "output_index", "content_index", "text"]
MEMBERS += ["arguments", "sequence_number", "stream_id", "error", "summary_index", "part"]


@given(
    st.lists(
        st.fixed_dictionaries(
            {"type": st.sampled_from([*EVENT_READERS, "response.content_part.added"])},
            optional=dict.fromkeys(MEMBERS, JSON),
        ),
        max_size=5,
    )
)
def test_no_event_of_any_shape_makes_the_decoder_raise(events: list[Message]) -> None:
    """Known types with members of any JSON type end in an outcome."""
    outcome = assemble(decode(encode_sse(events)))
    assert outcome.status in ("completed", "incomplete", "failed", "cut")


@given(JSON, st.sampled_from(["message", "reasoning", "function_call", "x", 7, None]), st.data())
def test_no_item_of_any_shape_makes_the_assembler_raise(
    value: Any, kind: Any, data: st.DataObject
) -> None:
    """Items with members of any JSON type are kept, or fail the response."""
    names = ["id", "role", "content", "summary", "call_id", "name", "arguments", "status"]
    item = {
        "type": kind,
        **data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(names, JSON))),
    }
    events = [
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        response_event("completed", output=[item, value]),
    ]
    outcome = assemble(decode(encode_sse(events)))
    assert outcome.status in ("completed", "failed")


def test_minus_infinity_costs_no_event() -> None:
    """A log probability that is no JSON number does not lose its words."""
    stream = (
        b'data: {"type":"response.output_text.delta","output_index":0,"delta":"hi",'
        b'"logprobs":[{"token":"hi","logprob":-Infinity}]}\n\n'
    )
    assert decode(stream) == [TextDelta("hi", "", 0)]


def test_the_bounds_of_the_stream_are_enforced() -> None:
    """A line that never ends is refused by name."""
    decoder = ResponsesDecoder(max_line=100)
    with pytest.raises(StreamTooLarge):
        decoder.feed(b"data: " + b"x" * 200)


# Torn characters.


def test_an_emoji_split_over_two_deltas_is_put_together() -> None:
    """Each delta that is given out can be shown as it is."""
    deltas = [e.delta for e in decode(read_transcript("text")) if isinstance(e, TextDelta)]
    assert deltas == ["Hel", "lo", " ", "\U0001f600", " from", " Zürich", "."]


def test_halves_of_different_parts_do_not_meet() -> None:
    """Two texts that interleave keep their halves apart."""
    high, low = "\ud83d", "\ude00"
    events = [
        {"type": f"response.{kind}.delta", "item_id": item, "output_index": 0, "delta": half}
        for half in (high, low)
        for kind, item in (("output_text", "a"), ("output_text", "b"), ("refusal", "a"))
    ]
    assert decode(encode_sse(events)) == [
        TextDelta("\U0001f600", "a", 0),
        TextDelta("\U0001f600", "b", 0),
        RefusalDelta("\U0001f600", "a", 0),
    ]


def test_a_lone_half_becomes_a_replacement_character() -> None:
    """In deltas, in whole texts and in items alike."""
    half = "a\ud83d"
    item = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": half}],
    }
    events = [
        {"type": "response.output_text.delta", "output_index": 0, "delta": half},
        {"type": "response.output_text.delta", "output_index": 0, "delta": "b"},
        {"type": "response.output_text.done", "output_index": 0, "text": half},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        response_event("completed", output=[item]),
    ]
    for feed in (lambda: decode(encode_sse(events)), lambda: _decode_messages(events)):
        found = feed()
        assert found[:3] == [
            TextDelta("a", "", 0),
            TextDelta("\ufffdb", "", 0),
            PartCompleted("text", "a\ufffd", "", 0),
        ]
        assert assemble(found).blocks[0].content[0].text == "a\ufffd"  # type: ignore[attr-defined]


def _decode_messages(events: list[Message]) -> list[Any]:
    decoder = ResponsesDecoder()
    return [found for event in events for found in decoder.feed_message(event)]


# Numbers.


def numbered_deltas(*numbers: int) -> list[Message]:
    return [
        {
            "type": "response.output_text.delta",
            "output_index": 0,
            "delta": f"<{at}>",
            "sequence_number": n,
        }
        for at, n in enumerate(numbers)
    ]


def test_gaps_and_late_events_are_noted() -> None:
    """The stream goes on; the log and an event say what was amiss."""
    decoder = ResponsesDecoder()
    events = decode(encode_sse(numbered_deltas(0, 2, 1, 3)), decoder=decoder)
    assert [e for e in events if isinstance(e, AnomalyNoted)] == [
        AnomalyNoted("gap", "events are missing before sequence number 2"),
        AnomalyNoted("late", "event 1 arrived late"),
    ]
    assert (decoder.gaps, decoder.late, decoder.duplicates) == (1, 1, 0)
    assert "".join(e.delta for e in events if isinstance(e, TextDelta)) == "<0><1><2><3>"


def test_numbers_that_mean_nothing_lose_no_text(caplog: pytest.LogCaptureFixture) -> None:
    """A server that numbers everything 0 is read as if it did not number at all."""
    events = decode(encode_sse(numbered_deltas(0, 0, 0, 0)))
    assert "".join(e.delta for e in events if isinstance(e, TextDelta)) == "<0><1><2><3>"
    assert caplog.text.count("sequence numbers are ignored") == 1


def test_a_gap_without_finished_items_is_not_success() -> None:
    """Words may be missing, and nobody vouches for the rest."""
    assert not assemble(
        decode(encode_sse([*numbered_deltas(0, 2), response_event("completed")]))
    ).completed
    assert assemble(
        decode(encode_sse([*numbered_deltas(0, 1), response_event("completed")]))
    ).completed


CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "t", "arguments": "[1]"}


@pytest.mark.parametrize("member", ["arguments", "name", "call_id"])
def test_a_listed_call_that_differs_from_the_streamed_one_is_a_contradiction(member: str) -> None:
    """The streamed call has been executed by then; the server may remember the other."""
    stream = [
        {"type": "response.created", "response": {"id": "resp_1"}},
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {**CALL, "arguments": ""},
        },
        {"type": "response.output_item.done", "output_index": 0, "item": CALL},
    ]
    for listed, contradicted in ((CALL, False), ({**CALL, member: "[2]"}, True)):
        end = {"type": "response.completed", "response": {"id": "resp_1", "output": [listed]}}
        outcome = replay([*stream, end])
        assert outcome.completed
        assert list(outcome.blocks) == [tool_call("t", "[1]", call_id="call_1")]
        assert bool(outcome.anchor_problem) is contradicted


@pytest.mark.parametrize(
    ("texts", "replaced"),
    [
        (["a\ud83d", "\ude00b"], False),
        (["a\ufffdb"], False),
        (["a\ud83d", "b"], True),
        (["a\ude00"], True),
        (["a", "b\ud83d"], True),
    ],
    ids=["two halves", "a character of the model", "a first half", "a second half", "at the end"],
)
@pytest.mark.parametrize("way", ["deltas", "item", "whole"])
def test_a_lone_surrogate_costs_the_anchor(texts: list[str], replaced: bool, way: str) -> None:
    """U+FFFD is in the Turn where the server has stored something else."""
    text = json.loads(json.dumps("".join(texts)))  # as a parser gives it
    item = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text}],
    }
    deltas = [
        {"type": "response.output_text.delta", "item_id": "m", "output_index": 0, "delta": delta}
        for delta in texts
    ]
    done = {"type": "response.output_item.done", "output_index": 0, "item": {**item, "id": "m"}}
    end = {"type": "response.completed", "response": {"id": "resp_1", "status": "completed"}}
    if way == "whole":
        complete = {"id": "resp_1", "status": "completed", "output": [item]}
        outcome = assemble(ResponsesDecoder().feed_whole(complete))
    else:
        outcome = replay([*(deltas if way == "deltas" else [done]), end])
    assert outcome.completed
    assert bool(outcome.anchor_problem) is replaced
