"""Correlating events with tool calls, by ``call_id`` first."""

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from kedge.events import (
    StreamEvent,
    ToolArgumentsDelta,
    ToolCallCompleted,
    ToolCallRenamed,
    ToolCallStarted,
)
from kedge.turns import ToolCallBlock, tool_call
from kedge.wire import ResponsesDecoder
from wire.streams import (
    Message,
    assemble,
    decode,
    encode_sse,
    item_event,
    read_messages,
    replay,
    response_event,
)

ABSENT = object()


def call_item(item_id: Any, call_id: Any, name: str = "roll", args: str = "{}") -> Message:
    names = {"type": "function_call", "id": item_id, "call_id": call_id, "name": name}
    return {
        member: value
        for member, value in {**names, "arguments": args}.items()
        if value is not ABSENT
    }


def item_added(item_id: Any, call_id: Any, at: int = 0, name: str = "roll") -> Message:
    return item_event("added", call_item(item_id, call_id, name, ""), at)


def item_done(
    item_id: Any, call_id: Any, at: int = 0, args: str = "{}", name: str = "roll"
) -> Message:
    return item_event("done", call_item(item_id, call_id, name, args), at)


def arguments_delta(item_id: str, arguments: str, at: int = 0) -> Message:
    kind = "response.function_call_arguments.delta"
    return {"type": kind, "item_id": item_id, "output_index": at, "delta": arguments}


def arguments_done(item_id: str, arguments: str, at: int = 0) -> Message:
    kind = "response.function_call_arguments.done"
    return {"type": kind, "item_id": item_id, "output_index": at, "arguments": arguments}


def response_completed(*items: Message) -> Message:
    return response_event("completed", status="completed", output=list(items))


ONE = item_added("fc_1", "call_1")


def decode_calls(*events: Message) -> list[tuple[str, str]]:
    """Return the call id and the arguments of each call in a response that is complete."""
    result = replay(events)
    assert result.completed, result
    calls = (block for block in result.blocks if isinstance(block, ToolCallBlock))
    return [(call.call_id, call.arguments) for call in calls]


def decode_events(*messages: Message) -> list[StreamEvent]:
    return decode(encode_sse(messages))


def test_every_event_of_a_call_has_its_call_id() -> None:
    """The ``call_id`` of the added item is in each event, and in the block passed to a tool runner."""
    delta = arguments_delta("fc_1", "{}", 3)
    stream = [item_added("fc_1", "call_1", 3), delta, item_done("fc_1", "call_1", 3)]
    assert decode_events(*stream)[:3] == [
        ToolCallStarted("call_1", "roll", "fc_1", 3),
        ToolArgumentsDelta("call_1", "{}"),
        ToolCallCompleted("call_1", "roll", "{}", "fc_1", 3),
    ]
    (call,) = replay([*stream, response_completed()]).blocks
    assert isinstance(call, ToolCallBlock)
    assert (call.call_id, call.item_id) == ("call_1", "fc_1")


@for_each(
    ("call_id", "flaw"),
    [(ABSENT, "missing"), (None, "missing"), ("", "empty"), ("  ", "empty"), (7, "malformed")],
)
def test_missing_call_id_falls_back_to_the_item_id(
    call_id: Any, flaw: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The item id is used, a warning gives the reason, and the fallback is counted."""
    caplog.clear()
    decoder = ResponsesDecoder()
    stream = [item_added("fc_1", call_id), arguments_delta("fc_1", "{}")]
    stream += [item_done("fc_1", call_id), response_completed()]
    events = decode(encode_sse(stream), decoder=decoder)
    assert events[:2] == [
        ToolCallStarted("fc_1", "roll", "fc_1", 0, fallback=flaw),
        ToolArgumentsDelta("fc_1", "{}"),
    ]
    assert list(assemble(events).blocks) == [tool_call("roll", "{}", call_id="fc_1")]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert f"its call_id is {flaw}" in warning
    assert "item id" in warning
    assert (decoder.calls.extracted, decoder.calls.fallen_back) == (0, 1)


def test_an_item_id_that_is_the_id_of_another_call_is_no_fallback() -> None:
    """Two calls never have the same id, also if one has no id and its item is named like the other."""
    calls = decode_calls(item_done("fc_1", "x"), item_done("x", ABSENT, 1), response_completed())
    assert (len(set(calls)), calls[0]) == (2, ("x", "{}"))


def test_summary_of_a_cut_stream_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The summary of a cut stream lists the open calls, and is logged once."""
    caplog.set_level(logging.INFO, "kedge.wire.items")
    decoder = ResponsesDecoder()
    decode(encode_sse(read_messages("parallel_calls")[:8]), decoder=decoder)
    assert decoder.calls.summary().open == ("call_alpha", "call_beta")
    assert len(caplog.messages) == 1
    decoder.close()
    assert len(caplog.messages) == 1


TWO_LISTED = [call_item("fc_roll", f"call_{n}", args=f"[{n}]") for n in (1, 2)]
TWO_WITH_ONE_ITEM_ID = [
    *(item_added("fc_roll", "call_1", 0), item_added("fc_roll", "call_2", 1)),
    *(arguments_delta("fc_roll", "[1", 0), arguments_delta("fc_roll", "[2", 1)),
    *(arguments_delta("fc_roll", "]", 0), arguments_done("fc_roll", "[2]", 1)),
    *(item_done("fc_roll", "call_1", 0, "[1]"), item_done("fc_roll", "call_2", 1, "[2]")),
]
STREAMS: dict[str, tuple[list[Message], dict[str, str]]] = {
    "early deltas are stored by item id": (
        [
            *(arguments_delta("fc_2", "[2]", 1), arguments_delta("fc_1", "[1]", 0)),
            arguments_done("fc_1", "[1]", 0),
            *(item_added("fc_1", "call_1", 0), item_added("fc_2", "call_2", 1)),
        ],
        {"call_1": "[1]", "call_2": "[2]"},
    ),
    "early deltas name the call that they waited for": (
        [
            *(arguments_delta("fc_1", "[1", 0), item_added(ABSENT, "call_1", 0)),
            *(item_added(ABSENT, "call_2", 1), arguments_delta("", "[2]", 1)),
            arguments_delta("fc_1", "]", -1),
        ],
        {"call_1": "[1]", "call_2": "[2]"},
    ),
    "empty final arguments do not erase those of the deltas": (
        [ONE, arguments_delta("fc_1", "{}"), item_done("fc_1", "call_1", 0, "")],
        {"call_1": "{}"},
    ),
    "a finished call without any arguments is complete": (
        [ONE, item_done("fc_1", "call_1", 0, "")],
        {"call_1": ""},
    ),
    "a changed item id is matched by the index": (
        [
            *(item_added("fc_1", "call_1", 0), item_added("fc_2", "call_2", 1)),
            *(arguments_delta("fc_x", "[1]", 0), arguments_delta("fc_y", "[2]", 1)),
            *(item_done("fc_z", "call_2", 1, "[2]"), item_done("fc_w", "call_1", 0, "[1]")),
            response_completed(*({**item, "id": f"fc_{at}"} for at, item in enumerate(TWO_LISTED))),
        ],
        {"call_1": "[1]", "call_2": "[2]"},
    ),
    "calls with one item id are told apart by call id and index": (
        [*TWO_WITH_ONE_ITEM_ID, response_completed(*TWO_LISTED)],
        {"call_1": "[1]", "call_2": "[2]"},
    ),
    "calls with one item id that are not listed": (
        TWO_WITH_ONE_ITEM_ID,
        {"call_1": "[1]", "call_2": "[2]"},
    ),
    "calls are in output order, in whichever order they start and finish": (
        [
            *(item_added("fc_2", "call_2", 1), item_added("fc_1", "call_1", 0)),
            *(item_done("fc_2", "call_2", 1), item_done("fc_1", "call_1", 0)),
        ],
        {"call_1": "{}", "call_2": "{}"},
    ),
    "a second call with the same call id uses its item id, so that results can be matched": (
        [
            *(item_added("fc_1", "roll", 0), item_done("fc_1", "roll", 0, "[1]")),
            *(item_added("fc_2", "roll", 1), arguments_delta("fc_2", "[2]", 1)),
            item_done("fc_2", "roll", 1, "[2]"),
            response_completed(*(call_item(f"fc_{n}", "roll", args=f"[{n}]") for n in (1, 2))),
        ],
        {"roll": "[1]", "fc_2": "[2]"},
    ),
    "a finished item with other ids at the same index does not start another call": (
        [
            *(ONE, arguments_delta("fc_1", "{}"), item_done("fc_2", "call_2")),
            response_completed(call_item("fc_3", "call_3")),
        ],
        {"call_2": "{}"},
    ),
}


@for_each("name", STREAMS)
def test_calls_of_a_stream_have_their_arguments(name: str) -> None:
    """Events are assigned to calls by call id, item id and output index, in this order."""
    stream, expected = STREAMS[name]
    if stream[-1]["type"] != "response.completed":
        stream = [*stream, response_completed()]
    assert decode_calls(*stream) == list(expected.items())


@for_each("late", ["done", "listed"])
def test_a_late_call_id_replaces_the_generated_one(late: str) -> None:
    """A call id that first appears in the finished item or response replaces the fallback id."""
    real = "call_real"
    endings = {
        "done": [item_done("fc_1", real), response_completed()],
        "listed": [
            *(arguments_done("fc_1", "{}"), item_done("fc_1", "")),
            response_completed(call_item("fc_1", real)),
        ],
    }
    stream = [item_added("fc_1", "", 0), arguments_delta("fc_1", "{}"), *endings[late]]
    events = decode_events(*stream)
    assert events[0] == ToolCallStarted("fc_1", "roll", "fc_1", 0, fallback="empty")
    assert ToolCallRenamed(real, "fc_1") in events
    assert decode_calls(*stream) == [(real, "{}")]


def test_deltas_after_a_correction_have_the_new_call_id() -> None:
    """A second ``added`` event with the call id renames the call for all later deltas."""
    stream = [
        item_added("fc_1", ""),
        arguments_delta("fc_1", "{"),
        ONE,
        arguments_delta("fc_1", "}"),
    ]
    assert decode_events(*stream)[2:] == [
        ToolCallRenamed("call_1", "fc_1"),
        ToolArgumentsDelta("call_1", "}"),
    ]
    assert decode_calls(*stream, response_completed()) == [("call_1", "{}")]


def test_early_deltas_wait_for_their_call() -> None:
    """Deltas that arrive before their call are emitted after its start."""
    early = [arguments_delta("fc_1", '{"a"', 1), arguments_delta("fc_1", ":1}", 1)]
    assert decode_events(*early, item_added("fc_1", "call_1", 1)) == [
        ToolCallStarted("call_1", "roll", "fc_1", 1),
        ToolArgumentsDelta("call_1", '{"a":1}'),
    ]


@for_each(
    "final",
    [
        arguments_done("fc_1", '{"secret":"hunter2"}'),
        item_done("fc_1", "call_1", 0, '{"secret":"hunter2"}'),
    ],
)
def test_final_arguments_override_the_deltas(
    final: Message, caplog: pytest.LogCaptureFixture
) -> None:
    """The final arguments are used if they differ from the deltas, and are not logged."""
    caplog.clear()
    stream = [ONE, arguments_delta("fc_1", '{"secret":"hunter'), final, response_completed()]
    assert decode_calls(*stream) == [("call_1", '{"secret":"hunter2"}')]
    assert "'call_1': the complete arguments (20 characters) differ" in caplog.text
    assert "hunter" not in caplog.text


def test_further_deltas_of_a_complete_call_are_ignored() -> None:
    """Deltas of a completed call are ignored, even with an unknown item id."""
    stream = [ONE, item_done("fc_1", "call_1", 0, "[1]")]
    late = [
        arguments_delta("fc_x", "[1"),
        arguments_done("fc_y", "[1]"),
        arguments_delta("fc_1", "]"),
    ]
    assert decode_events(*stream, *late) == decode_events(*stream)
    assert decode_calls(*stream, *late, response_completed()) == [("call_1", "[1]")]


def test_calls_without_ids_are_distinguished_by_index() -> None:
    """Calls without a call id and an item id are distinguished by output index."""
    calls = decode_calls(
        *(item_added("", ABSENT, 0), item_added("", ABSENT, 1)),
        *(arguments_delta("", "[2]", 1), arguments_delta("", "[1]", 0)),
        *(item_done("", ABSENT, 0, "[1]"), item_done("", ABSENT, 1, "[2]")),
        response_completed(call_item("", ABSENT, args="[1]"), call_item("", ABSENT, args="[2]")),
    )
    assert [arguments for _, arguments in calls] == ["[1]", "[2]"]
    assert len({call_id for call_id, _ in calls}) == 2


NAMELESS = item_added("fc_1", "call_1", name="")


@for_each(
    "stream",
    [
        [arguments_delta("fc_1", "{}"), response_completed()],
        [arguments_done("fc_1", "{}"), response_completed()],
        [ONE, response_completed()],
        [NAMELESS, arguments_delta("fc_1", "{}"), response_completed()],
        [item_done("fc_1", "call_1", name=""), response_completed()],
        [response_completed(call_item("fc_1", "call_1", name=""))],
    ],
)
def test_an_incomplete_call_fails_the_response(
    stream: list[Message], caplog: pytest.LogCaptureFixture
) -> None:
    """A call without a name or arguments cannot be answered, so the response is a failure."""
    caplog.clear()
    decoder = ResponsesDecoder()
    result = assemble(decode(encode_sse(stream), decoder=decoder))
    assert (result.status, result.code) == ("failed", "damaged_stream")
    assert decoder.calls.failed == 1
    assert "is not a complete tool call" in caplog.text


def test_call_with_status_incomplete_is_not_completed() -> None:
    """A call cut by the token limit is started but not completed, and its block is partial."""
    half = item_done("fc_1", "call_1", args='{"a":')
    half["item"]["status"] = "incomplete"
    details = {"reason": "max_output_tokens"}
    end = response_event("incomplete", incomplete_details=details, output=[half["item"]])
    events = decode_events(ONE, arguments_delta("fc_1", '{"a":'), half, end)
    assert not [event for event in events if isinstance(event, ToolCallCompleted)]
    result = assemble(events)
    assert (result.status, result.reason) == ("incomplete", "max_output_tokens")
    assert result.whole_blocks == ()
    assert [b.metadata.get("kedge.partial") for b in result.blocks] == [True]
    assert replay([ONE, half, response_completed()]).status == "failed"


@given(st.permutations(range(9)))
def test_any_order_of_events_gives_the_same_calls(order: list[int]) -> None:
    """The events before the final one can arrive in any order."""
    events = [response_event("created")]
    for item, call, at, arguments in (("fc_1", "call_1", 0, "[1]"), ("fc_2", "call_2", 1, "[2]")):
        events += [item_added(item, call, at), arguments_delta(item, arguments, at)]
        events += [arguments_done(item, arguments, at), item_done(item, call, at, arguments)]
    calls = decode_calls(*(events[at] for at in order), response_completed())
    assert calls == [("call_1", "[1]"), ("call_2", "[2]")]


ITEM_EVENTS = st.builds(
    lambda make, item, call, at: make(item, call, at),
    st.sampled_from([item_added, item_done]),
    st.sampled_from(["fc_1", "fc_2", ""]),
    st.sampled_from(["call_1", "call_2", "", None, 3, ["x"]]),
    st.integers(-1, 2),
)
ITEM_IDS = st.sampled_from(["fc_1", "fc_2", "fc_3", ""])
DELTAS = st.builds(arguments_delta, ITEM_IDS, st.just("x"), st.integers(-1, 2))


@given(st.lists(ITEM_EVENTS | DELTAS, max_size=10))
def test_state_is_consistent_for_any_stream(events: list[Message]) -> None:
    """Any stream leaves a consistent state, and every event of a call has a known id."""
    decoder = ResponsesDecoder()
    decoded_events = decode(encode_sse([*events, response_completed()]), decoder=decoder)
    state = decoder.calls
    assert all(call_id == call.call_id for call_id, call in state.calls.items())
    assert all(call.call_id == name for name, call in state.calls.items())
    names: set[str] = set()
    for event in decoded_events:
        match event:
            case ToolCallStarted():
                names.add(event.call_id)
            case ToolCallRenamed():
                assert event.was in names
                names.add(event.call_id)
            case ToolArgumentsDelta() | ToolCallCompleted():
                assert event.call_id in names
            case _:
                pass
    result = assemble(decoded_events)
    ids = [block.call_id for block in result.blocks if isinstance(block, ToolCallBlock)]
    assert len(ids) == len(set(ids))


@for_each(
    "stream",
    [
        [NAMELESS, arguments_delta("fc_1", '{"a":1}'), response_completed()],
        [item_done("fc_1", "call_1", 0, '{"a":1}', ""), response_completed()],
        [response_completed(call_item("fc_1", "call_1", "", '{"a":1}'))],
    ],
)
def test_call_without_a_name_is_completed_by_inference(
    stream: list[Message], caplog: pytest.LogCaptureFixture
) -> None:
    """A call without a name is completed with an inferred one, and the response is not an anchor."""
    caplog.clear()
    decoder = ResponsesDecoder()
    names = {('{"a":1}', False): "add"}
    decoder.calls.infer_name = lambda arguments, custom: names.get((arguments, custom), "")
    result = assemble(decode(encode_sse(stream), decoder=decoder))
    assert result.status == "completed"
    assert [getattr(block, "name", "") for block in result.blocks] == ["add"]
    assert decoder.calls.inferred == 1
    assert "inferred" in result.anchor_problem
    assert "'call_1' has no name" in caplog.text


@for_each("missing", [0, 1])
def test_a_call_with_an_unknown_index_is_matched_by_its_id(missing: int) -> None:
    """A call whose output index one of two events lacks is one call, at the index of the other."""
    stated = [item_added(ABSENT, "call_1"), item_done(ABSENT, "call_1", args='{"n":1}')]
    del stated[missing]["output_index"]
    assert decode_calls(*stated, response_completed()) == [("call_1", '{"n":1}')]
