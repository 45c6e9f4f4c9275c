"""The decoder of the Responses API handles every event type and never raises."""

import json
import logging
import math
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from kedge.events import (
    AnomalyNoted,
    OpaqueEvent,
    PartCompleted,
    RefusalDelta,
    ResponseCompleted,
    ResponseFailed,
    ResponseIncomplete,
    ResponseStarted,
    StreamEvent,
    StreamFailed,
    TextDelta,
    Usage,
)
from kedge.turns import AssistantBlock, ToolCallBlock, assistant, tool_call
from kedge.wire import Assembler, ResponsesDecoder
from strategies import json_values
from wire import streams
from wire.streams import (
    PASSED_ON,
    Message,
    assemble,
    item_event,
    message_item,
    read_transcript,
    replay,
    response_event,
    text_delta,
)


def decode(*events: Message) -> list[StreamEvent]:
    """Return what a decoder reads from these events."""
    return streams.decode(streams.encode_sse(events))


@for_each("kind", [*sorted(PASSED_ON), "response.telepathy.started"])
def test_an_opaque_event_is_preserved(kind: str) -> None:
    """An event that is not interpreted, or whose type is unknown, is passed on unchanged."""
    event = {"type": kind, "item_id": "x_1", "output_index": 0, "delta": "d", "more": [1, {}]}
    assert decode(event) == [OpaqueEvent(kind, event)]


def test_type_can_be_in_the_event_line_only() -> None:
    """The type is read from the ``event`` line if the data has none."""
    stream = b'event: response.output_text.delta\ndata: {"delta":"hi","output_index":0}\n\n'
    assert streams.decode(stream) == [TextDelta("hi", "", 0, 0)]


@for_each(
    ("response", "expected"),
    [
        ({"previous_response_id": "resp_0"}, ("resp_0", True)),
        ({"previous_response_id": None}, (None, True)),
        ({}, (None, False)),
    ],
)
def test_null_anchor_is_distinguished_from_a_missing_one(response: Message, expected: Any) -> None:
    """A null ``previous_response_id`` is echoed; a missing member is not, nor is a missing response."""
    kinds = ("response.queued", "response.created")  # of which the first starts the response
    started, later = decode(*({"type": kind, "response": response} for kind in kinds))
    assert isinstance(started, ResponseStarted)
    assert isinstance(later, OpaqueEvent)
    assert (started.previous_response_id, started.echoed) == expected
    assert decode({"type": "response.created"}) == [ResponseStarted()]


GONE = {"code": "gone", "message": "No.", "param": "id", "type": "invalid"}


@for_each(
    ("data", "failure"),
    [
        ({"type": "error", "code": "busy", "message": "Wait."}, StreamFailed("busy", "Wait.")),
        (
            {"type": "error", "status": 400, "error": GONE},
            StreamFailed("gone", "No.", "id", "invalid", 400),
        ),
        ({"error": {"message": "no", "code": 404}}, StreamFailed("404", "no")),
        ({"error": "broken"}, StreamFailed("", "broken")),
        ({"error": None, "type": "error"}, StreamFailed()),
        ({"type": "error"}, StreamFailed()),
    ],
)
def test_error_of_any_shape_is_a_failure(data: Message, failure: StreamFailed) -> None:
    """An error event, flat as in a stream or nested as over a WebSocket, gives a failed outcome."""
    events = decode(data)
    assert events == [failure]
    assert assemble(events).status == "failed"


@for_each(
    ("kind", "members", "expected", "detail"),
    [
        ("completed", {"status": "completed"}, ResponseCompleted, ""),
        ("completed", {"status": "incomplete"}, ResponseIncomplete, ""),
        ("completed", {"status": "failed"}, ResponseFailed, "failed"),
        ("completed", {"status": "cancelled"}, ResponseFailed, "cancelled"),
        ("completed", {"status": "in_progress"}, ResponseFailed, "status_mismatch"),
        ("incomplete", {"status": "completed"}, ResponseIncomplete, ""),
        ("incomplete", {"incomplete_details": {"reason": "filter"}}, ResponseIncomplete, "filter"),
        ("failed", {"status": "completed"}, ResponseFailed, "status_mismatch"),
        ("failed", {"error": {"code": "server_error"}}, ResponseFailed, "server_error"),
        ("failed", {"status": "failed", "error": None}, ResponseFailed, "failed"),
        ("failed", {"status": "failed", "error": ["broken"]}, ResponseFailed, "failed"),
        ("cancelled", {}, ResponseFailed, "cancelled"),
        ("done", {"status": "incomplete"}, ResponseIncomplete, ""),
    ],
)
def test_worse_of_type_and_status_is_used(
    kind: str, members: Message, expected: type, detail: str
) -> None:
    """A final event whose type and status differ is never a success."""
    decoded = decode(response_event(kind, **members))[-1]
    assert type(decoded) is expected
    assert getattr(decoded, "code", getattr(decoded, "reason", "")) == detail
    assert assemble([decoded]).completed == (expected is ResponseCompleted)


def test_events_after_the_end_are_ignored() -> None:
    """Events after the final event are ignored."""
    stream = read_transcript("text")
    decoder = ResponsesDecoder()
    late = streams.encode_sse([text_delta("ghost", output_index=5)])
    assert streams.decode(stream, late, decoder=decoder) == streams.decode(stream)
    assert decoder.ended


@for_each(("length", "known"), [(1_500, True), (1_501, False)])
@for_each("start", ["", "\u00e9" * 700])
def test_names_have_lengths_that_databases_can_index(length: int, start: str, known: bool) -> None:
    """An id that is too long counts as none, because a part of it identifies nothing; a model is shortened."""
    name = start + "x" * (length - len(start.encode()))
    event = decode(response_event("completed", id=name, model=name))[-1]
    assert isinstance(event, ResponseCompleted)
    assert event.response_id == (name if known else "")
    assert event.model == name[:200]


@for_each(
    ("usage", "expected"),
    [
        *(
            (each, [None, Usage()])
            for each in (None, 7, [], {"input_tokens": "many"}, {"input_tokens": -1})
        ),
        ({"input_tokens": 10**30, "output_tokens": 1e30}, [Usage()]),
        ({"input_tokens": 3.0, "output_tokens": 4.5}, [Usage(3, 0, 0, 0, 3)]),
        ({"input_tokens": 3, "output_tokens": 4}, [Usage(3, 0, 4, 0, 7)]),
    ],
)
def test_usage_is_read_as_far_as_it_is_valid(usage: Any, expected: list[Usage | None]) -> None:
    """Token counts that cannot be parsed are ignored, and a missing total is the sum of the others."""
    event = decode(response_event("completed", usage=usage))[-1]
    assert isinstance(event, ResponseCompleted)
    assert event.usage in expected


@for_each(
    "data",
    [
        *("nonsense", "[]", "7", "{}", '{"type":7}', "[" * 100_000),
        '{"type":"response.output_text.delta"',
        '{"type":"response.output_text.delta"}',
        '{"type":"response.output_text.delta","delta":7}',
        '{"type":"response.output_item.added"}',
        '{"type":"response.output_item.done","item":[]}',
        '{"type":"response.output_text.done"}',
        '{"type":"response.output_text.delta","delta":' + "1" * 5000 + "}",
    ],
)
def test_malformed_event_is_reported(data: str) -> None:
    """A malformed event is reported as an anomaly, and the finished items still complete the response."""
    stream = read_transcript("text")
    first, _, rest = stream.partition(b"\n\n")
    events = streams.decode(first + b"\n\ndata: " + data.encode() + b"\n\n" + rest)
    assert [e.kind for e in events if isinstance(e, AnomalyNoted)] == ["malformed"]
    assert [e for e in events if not isinstance(e, AnomalyNoted)] == streams.decode(stream)
    assert assemble(events).completed


def test_content_of_malformed_events_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Values are not logged, nor event types and member names that look like content."""
    secret = "sk-live secret words"
    caplog.set_level(logging.DEBUG)
    decode({"type": secret, secret: 1}, {"type": 7, secret: secret}, text_delta({"a": secret}))
    streams.decode(f"event: response.{secret}\ndata: {secret}\n\n".encode())
    assert "delta is an object, not a string" in caplog.text
    assert "secret words" not in caplog.text


def test_number_of_listed_names_is_limited() -> None:
    """The report of a malformed event lists only a few of its member names."""
    event = {"type": "response.output_text.delta", **{f"m{n}": n for n in range(1000)}}
    (recorded,) = decode(event)
    assert isinstance(recorded, AnomalyNoted)
    assert len(recorded.detail) < 300


JSON = json_values()
MEMBERS = ["item", "delta", "response", "item_id", "output_index", "content_index", "text"]
MEMBERS += ["arguments", "sequence_number", "stream_id", "error", "summary_index", "part"]


TYPES = st.sampled_from([*ResponsesDecoder.EVENT_READERS, "response.content_part.added"])


@given(
    st.lists(
        st.fixed_dictionaries({"type": TYPES}, optional=dict.fromkeys(MEMBERS, JSON)), max_size=5
    )
)
def test_decoder_does_not_raise_for_any_event(events: list[Message]) -> None:
    """Events of known types with members of any JSON type give an outcome."""
    assert replay(events).status in ("completed", "incomplete", "failed", "cut")


ITEM_MEMBERS = ["id", "role", "content", "summary", "call_id", "name", "arguments", "status"]
ITEMS = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "reasoning", "function_call", "x", 7, None])},
    optional=dict.fromkeys(ITEM_MEMBERS, JSON),
)


@given(JSON, ITEMS)
def test_assembler_does_not_raise_for_any_item(value: Any, item: Any) -> None:
    """Items with members of any JSON type are stored, or the response is a failure."""
    end = response_event("completed", output=[item, value])
    outcome = replay([item_event("added", item), item_event("done", item), end])
    assert outcome.status in ("completed", "failed")


def test_minus_infinity_is_accepted() -> None:
    """A delta with a log probability of ``-Infinity``, which is not JSON, is decoded."""
    logprobs = [{"token": "hi", "logprob": -math.inf}]
    expected = TextDelta("hi", "m", 0, logprobs=({"token": "hi", "logprob": None},))
    assert decode(text_delta("hi", logprobs=logprobs)) == [expected]


def test_surrogates_of_different_parts_are_not_joined() -> None:
    """Surrogates of interleaved texts are joined per item and part."""
    high = "\ud83d"
    low = "\ude00"
    events = [
        {"type": f"response.{kind}.delta", "item_id": item, "output_index": 0, "delta": surrogate}
        for surrogate in (high, low)
        for kind, item in (("output_text", "a"), ("output_text", "b"), ("refusal", "a"))
    ]
    assert decode(*events) == [
        TextDelta("\U0001f600", "a", 0),
        TextDelta("\U0001f600", "b", 0),
        RefusalDelta("\U0001f600", "a", 0),
    ]


def numbered_deltas(*numbers: int) -> list[Message]:
    return [text_delta(f"<{at}>", sequence_number=number) for at, number in enumerate(numbers)]


def test_gaps_and_late_events_are_reported() -> None:
    """Gaps and late events are reported as anomalies, and the stream continues."""
    events = decode(*numbered_deltas(0, 2, 1, 3))
    assert [e for e in events if isinstance(e, AnomalyNoted)] == [
        AnomalyNoted("gap", "events are missing before sequence number 2"),
        AnomalyNoted("late", "event 1 arrived late"),
    ]
    assert "".join(e.delta for e in events if isinstance(e, TextDelta)) == "<0><1><2><3>"


def test_meaningless_sequence_numbers_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """If every event has the number 0, the numbers are ignored and no text is lost."""
    events = decode(*numbered_deltas(0, 0, 0, 0))
    assert "".join(e.delta for e in events if isinstance(e, TextDelta)) == "<0><1><2><3>"
    assert caplog.text.count("sequence numbers are ignored") == 1


CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "t", "arguments": "[1]"}


@for_each("member", ["arguments", "name", "call_id"])
def test_listed_call_that_differs_prevents_an_anchor(member: str) -> None:
    """If listed and streamed call differ, the streamed one is used and the response is not an anchor."""
    started = item_event("added", {**CALL, "arguments": ""})
    done = item_event("done", CALL)
    for listed, contradicted in ((CALL, False), ({**CALL, member: "[2]"}, True)):
        end = response_event("completed", output=[listed])
        outcome = replay([response_event("created"), started, done, end])
        assert outcome.completed
        assert list(outcome.blocks) == [tool_call("t", "[1]", call_id="call_1")]
        assert bool(outcome.anchor_problem) is contradicted


@for_each("form", ["item done", "arguments done", "listed"])
def test_arguments_as_an_object_are_those_of_the_call(form: str) -> None:
    """Some servers send the arguments of a call as an object instead of its JSON text."""
    arguments = {"city": "Zürich"}
    item = {**CALL, "arguments": arguments}
    kind = "response.function_call_arguments.done"
    ended = {"type": kind, "output_index": 0, "item_id": "fc_1", "arguments": arguments}
    events = {"item done": [item_event("done", item)], "arguments done": [ended], "listed": []}
    end = response_event("completed", output=[item] if form == "listed" else [])
    outcome = replay([item_event("added", {**CALL, "arguments": {}}), *events[form], end])
    assert outcome.completed
    (block,) = outcome.blocks
    assert isinstance(block, ToolCallBlock)
    assert (block.call_id, json.loads(block.arguments)) == ("call_1", arguments)


@for_each(
    ("texts", "replaced"),
    [
        (["a\ud83d", "\ude00b"], False),
        (["a\ufffdb"], False),
        (["a\ud83d", "b"], True),
        (["a\ude00"], True),
        (["a", "b\ud83d"], True),
    ],
)
@for_each("way", ["deltas", "item", "whole"])
def test_lone_surrogate_prevents_an_anchor(texts: list[str], replaced: bool, way: str) -> None:
    """A response with a replaced surrogate is not an anchor, because the server stored other text."""
    item = message_item(json.loads(json.dumps("".join(texts))))  # as a JSON parser returns it
    if way == "whole":
        complete = {"id": "resp_1", "status": "completed", "output": [item]}
        outcome = assemble(ResponsesDecoder().feed_whole(complete))
    else:
        deltas = [text_delta(each) for each in texts]
        received = deltas if way == "deltas" else [item_event("done", item)]
        outcome = replay([*received, response_event("completed", status="completed")])
    assert outcome.completed
    assert bool(outcome.anchor_problem) is replaced
    [block] = outcome.blocks
    assert isinstance(block, AssistantBlock)
    assert bool(block.text.encode())  # which raises for a surrogate


def test_half_of_a_character_before_the_complete_text_is_not_replaced() -> None:
    """A text, and the arguments of a call, that are complete have both halves, so that nothing was replaced."""
    half = "a\ud83d"
    whole = "a\U0001f600"
    place = {"item_id": "fc_1", "output_index": 1}
    arguments = {"type": "response.function_call_arguments.delta", **place, "delta": half}
    events = [
        *(text_delta(half), {**text_delta(""), "type": "response.output_text.done", "text": whole}),
        *(item_event("added", {**CALL, "arguments": ""}, 1), arguments),
        {"type": "response.function_call_arguments.done", **place, "arguments": whole},
        response_event("completed", status="completed"),
    ]
    outcome = replay(events)
    assert list(outcome.blocks) == [assistant(whole), tool_call("t", whole, call_id="call_1")]
    assert outcome.anchor_problem == ""


EMPTY_CONTENTS: dict[str, dict[str, Any]] = {
    "null": {"content": None},
    "missing": {},
    "empty": {"content": []},
    "blank": {"content": [{"type": "output_text", "text": ""}]},
}
SOURCES = ("deltas", "text done", "part done", "item done", "listed")


@for_each("numbered", [True, False])
@for_each("empty", [*EMPTY_CONTENTS, "absent"])
def test_text_from_any_event_is_in_the_block_once(empty: str, numbered: bool) -> None:
    """Whichever events hold the text of a message, the block has it once, and so have the deltas."""
    text = "Hello"
    at = {"output_index": 0} if numbered else {}
    named = {"item_id": "m", "content_index": 0, **at}
    message: dict[str, Any] = {"type": "message", "id": "m", "role": "assistant"}
    part = {"type": "output_text", "text": text}
    for chosen in product([False, True], repeat=len(SOURCES)):
        streamed, text_done, part_done, item_done, listed = chosen
        if not any(chosen):
            continue
        started = {"type": "response.output_item.added", "item": {**message, "content": []}}
        stream = [response_event("created"), {**started, **at}]
        if streamed:
            delta = {"type": "response.output_text.delta", **named}
            stream += [{**delta, "delta": each} for each in ("Hel", "lo")]
        if text_done or empty == "blank":
            ended = text if text_done else ""
            stream.append({"type": "response.output_text.done", **named, "text": ended})
        if part_done:
            stream.append({"type": "response.content_part.done", **named, "part": part})
        without = {**message, **EMPTY_CONTENTS.get(empty, {})}
        whole = {**message, "content": [part]}
        if item_done or empty != "absent":
            item = whole if item_done else without
            stream.append({"type": "response.output_item.done", **at, "item": item})
        output = [whole if listed else without] if listed or empty != "absent" else []
        stream.append(response_event("completed", output=output))
        events = decode(*stream)
        assembler = Assembler()
        for event in events:
            assembler.feed(event)
        outcome = assembler.finish()
        deltas = [*events, *assembler.unstreamed_text()]
        shown = [event.delta for event in deltas if isinstance(event, TextDelta)]
        assert outcome.completed
        assert list(outcome.blocks) == [assistant(text)], chosen
        assert "".join(shown) == text, chosen
        versions = {item_done, listed} if empty != "absent" else {True}
        assert bool(outcome.anchor_problem) is (versions != {True}), chosen


def test_message_without_role_or_content_is_a_message_of_the_model() -> None:
    """Some servers omit the role, or write null for the content of a message without text."""
    part = {"type": "output_text", "text": "Hi", "annotations": []}
    for content, block in ((None, AssistantBlock(())), ([part], assistant("Hi"))):
        item = {"type": "message", "id": "m", "content": content}
        end = response_event("completed", output=[item])
        assert list(replay([item_event("done", item), end]).blocks) == [block]


@for_each(
    ("part", "index", "kind"),
    [
        ({"type": "refusal", "refusal": "No."}, "content_index", "refusal"),
        ({"type": "summary_text", "text": "No."}, "summary_index", "summary"),
        ({"type": "reasoning_text", "text": "No."}, "content_index", "reasoning"),
    ],
)
def test_finished_part_object_completes_its_part(part: Message, index: str, kind: str) -> None:
    """A finished part is read, once, whatever its kind; a part of an unknown kind is passed on."""
    group = "reasoning_summary_part" if kind == "summary" else "content_part"
    ended = {"type": f"response.{group}.done", "item_id": "x", "output_index": 0, index: 0}
    events = decode(*[{**ended, "part": part}] * 2)
    assert [type(each) for each in events[:1] + events[-1:]] == [OpaqueEvent] * 2
    (completed,) = (each for each in events if isinstance(each, PartCompleted))
    assert (completed.kind, completed.text) == (kind, "No.")
    unknown = {**ended, "part": {"type": "hologram", "text": "No."}}
    assert decode(unknown) == [OpaqueEvent(unknown["type"], unknown)]


def test_gap_before_an_empty_finished_message_is_damage() -> None:
    """A finished message without text does not confirm that the streamed text is complete."""
    created = {**response_event("created"), "sequence_number": 0}
    ended = item_event("done", {**message_item(""), "content": []})
    late = text_delta("lo", sequence_number=5)
    outcome = replay([created, late, ended, response_event("completed")])
    assert (outcome.status, outcome.code) == ("failed", "damaged_stream")


def test_an_error_instead_of_a_response_is_a_failure() -> None:
    """Some gateways send the errors of their upstream with the status of a successful response."""
    error = {"error": {"code": "busy", "message": "Wait."}}
    outcome = assemble(ResponsesDecoder().feed_whole(error))
    assert (outcome.status, outcome.code, outcome.message) == ("failed", "busy", "Wait.")
    response = {"id": "resp_1", "status": "completed", "output": [], "error": None}
    assert assemble(ResponsesDecoder().feed_whole(response)).completed


@for_each(
    ("status", "expected"),
    [("complete", "completed"), ("incomplete", "incomplete"), ("cancelled", "failed")],
)
def test_the_status_of_a_complete_object_decides(status: str, expected: str) -> None:
    """A response that was not streamed ends as its status says, also in the words of a gateway."""
    message = {"type": "message", "role": "assistant", "content": "Yes."}
    response = {"id": "resp_1", "status": status, "output": [message]}
    assert assemble(ResponsesDecoder().feed_whole(response)).status == expected
