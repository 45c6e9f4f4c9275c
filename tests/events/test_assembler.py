"""Assembling events of any provider into blocks, and the status of the outcome."""

import logging
from typing import Any

import pytest
from msgspec import structs

from events.streams import Message, assemble, decode, encode_sse, read_messages, replay
from for_each import for_each
from kedge.events import (
    AnomalyNoted,
    Assembler,
    Event,
    ItemCompleted,
    ItemStarted,
    OpaqueEvent,
    Outcome,
    PartCompleted,
    ReasoningDelta,
    RefusalDelta,
    ResponseCompleted,
    ResponseFailed,
    ResponseIncomplete,
    ResponseStarted,
    StreamEvent,
    StreamFailed,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallCompleted,
    ToolCallRenamed,
    ToolCallStarted,
    Usage,
)
from kedge.turns import AssistantBlock, RefusalPart, Source, assistant, opaque, reasoning, tool_call

COMPLETED = ResponseCompleted("resp_1", status="completed")


def message_item(text: str, item_id: str = "msg_1", **more: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": item_id, "role": "assistant", "content": content, **more}


@pytest.mark.parametrize("listed", [False, True])
def test_a_changed_event_does_not_change_the_block(listed: bool) -> None:
    """Whoever changes an item inside an event changes neither the block nor the digest of its anchor."""
    item = message_item("Hello")
    assembler = Assembler()
    if listed:
        assembler.feed(ResponseCompleted("resp_1", status="completed", output=(item,)))
    else:
        assembler.feed(ItemCompleted(item, 0))
    item["content"][0]["text"] = "Changed"
    if not listed:
        assembler.feed(COMPLETED)
    assert assembler.finish().blocks == (assistant("Hello"),)


def test_an_item_that_is_nested_too_deep_is_rejected() -> None:
    """An item that cannot become a block makes the response a failed one, whatever its depth."""
    nested: list[Any] = []
    for _ in range(900):
        nested = [nested]
    outcome = assemble([ItemCompleted({"type": "other", "id": "x", "value": nested}, 0), COMPLETED])
    assert outcome.status == "failed"


# Streams without finished items, as decoders of other providers produce them.


def test_deltas_alone_give_complete_blocks() -> None:
    """Deltas and a final event are sufficient, without items of the Responses API."""
    result = assemble(
        [
            ResponseStarted("chat_1", "some-model"),
            ReasoningDelta("Hm", "reasoning", output_index=0),
            ReasoningDelta("m.", "reasoning", output_index=0),
            TextDelta("Let me ", output_index=1),
            ToolCallStarted("call_1", "roll", output_index=2),
            TextDelta("see.", output_index=1),
            ToolArgumentsDelta("call_1", '{"sides"'),
            ToolArgumentsDelta("call_1", ":6}"),
            ToolCallCompleted("call_1", "roll", '{"sides":6}', output_index=2),
            ResponseCompleted("chat_1", "some-model", usage=Usage(1, 0, 2, 0, 3)),
        ]
    )
    assert result.completed
    assert list(result.blocks) == [
        reasoning(text="Hmm."),
        assistant("Let me see."),
        tool_call("roll", '{"sides":6}', call_id="call_1"),
    ]
    assert (result.response_id, result.model) == ("chat_1", "some-model")
    assert result.usage == Usage(1, 0, 2, 0, 3)
    assert [block.source for block in result.blocks] == [
        Source("chat_1", output_index=position) for position in range(3)
    ]


def test_blocks_without_an_index_are_in_order_of_arrival() -> None:
    """Blocks of events without an output index are in the order of arrival."""
    result = assemble(
        [
            ReasoningDelta("first", "summary"),
            TextDelta("sec"),
            ToolCallCompleted("call_1", "third", ""),
            TextDelta("ond"),
            COMPLETED,
        ]
    )
    assert list(result.blocks) == [
        reasoning("first"),
        assistant("second"),
        tool_call("third", "", call_id="call_1"),
    ]
    assert [block.output_index for block in result.blocks] == [0, 1, 2]


def test_parts_are_ordered_by_index() -> None:
    """Text, refusal, summary and reasoning parts are ordered by their index."""
    result = assemble(
        [
            RefusalDelta("no", "m", 0, 1),
            TextDelta("well, ", "m", 0, 0),
            ReasoningDelta("b", "summary", "r", 1, 1),
            ReasoningDelta("a", "summary", "r", 1, 0),
            ReasoningDelta("t", "reasoning", "r", 1, 0),
            COMPLETED,
        ]
    )
    assert list(result.blocks) == [
        assistant(["well, ", RefusalPart("no")]),
        reasoning(["a", "b"], text="t"),
    ]


def test_final_text_overrides_deltas(caplog: pytest.LogCaptureFixture) -> None:
    """The final text of a part replaces missing deltas, and later deltas are ignored."""
    events = [
        TextDelta("secret pass", "m", 0),
        PartCompleted("text", "secret password", "m", 0),
        TextDelta("!", "m", 0),
        PartCompleted("text", "", "m", 0),
        PartCompleted("summary", "thought", "r", 1),
        COMPLETED,
    ]
    assert list(assemble(events).blocks) == [assistant("secret password"), reasoning("thought")]
    assert "differs from its deltas (11 characters)" in caplog.text
    assert "secret" not in caplog.text


def test_an_empty_final_text_does_not_erase_deltas() -> None:
    """An empty final text is ignored, because some servers omit it."""
    events = [TextDelta("words", "m", 0), PartCompleted("text", "", "m", 0), COMPLETED]
    assert list(assemble(events).blocks) == [assistant("words")]


def test_split_surrogate_pair_is_joined_in_the_block() -> None:
    """A surrogate pair split over two deltas is one character in the block."""
    events = [TextDelta("\ud83d", "m", 0), TextDelta("\ude00", "m", 0), COMPLETED]
    assert list(assemble(events).blocks) == [assistant("\U0001f600")]


def test_renamed_call_is_found_by_both_ids() -> None:
    """Arguments before and after a rename belong to one call, even after its item has finished."""
    item = {"type": "function_call", "id": "fc_1", "call_id": "fc_1", "name": "roll"}
    events = [
        ToolCallStarted("fc_1", "roll", "fc_1", 0, fallback="missing"),
        ToolArgumentsDelta("fc_1", "{"),
        ItemCompleted({**item, "arguments": "{}"}, 0),
        ToolCallRenamed("call_1", "fc_1"),
        ToolArgumentsDelta("call_1", "}"),
        COMPLETED,
    ]
    assert list(assemble(events).blocks) == [tool_call("roll", "{}", call_id="call_1")]


def test_deltas_without_a_call_are_ignored() -> None:
    """Arguments or a new id for an unknown call create no block."""
    events = [ToolArgumentsDelta("call_x", "{}"), ToolCallRenamed("call_y", "call_x"), COMPLETED]
    assert assemble(events).blocks == ()


class WeatherEvent(Event, frozen=True):
    """An event type that the assembler does not know."""

    sky: str


def test_unknown_events_are_ignored() -> None:
    """An engine may feed all its events to the assembler, which ignores unknown ones."""
    assembler = Assembler()
    for event in (
        WeatherEvent("blue"),
        OpaqueEvent("response.tomorrow"),
        TextDelta("hi"),
        COMPLETED,
    ):
        assembler.feed(event)
    assert list(assembler.finish().blocks) == [assistant("hi")]


# Finished items.


def test_finished_item_overrides_deltas() -> None:
    """A finished item replaces its deltas, and its additional members are stored."""
    item = message_item("whole", phase="final_answer")
    events = [
        TextDelta("wh", "msg_1", 0),
        ItemCompleted(item, 0),
        TextDelta("!", "msg_1", 0),
        COMPLETED,
    ]
    (block,) = assemble(events).blocks
    assert block == assistant("whole")
    assert block.extra["item"] == {"phase": "final_answer"}


def test_an_item_finished_twice_counts_once(caplog: pytest.LogCaptureFixture) -> None:
    """The first finished item is used; a different second one is logged without its content."""
    events = [
        ItemCompleted(message_item("one"), 0),
        ItemCompleted(message_item("two secret"), 0),
        COMPLETED,
    ]
    assert list(assemble(events).blocks) == [assistant("one")]
    assert "the streamed version is used" in caplog.text
    assert "secret" not in caplog.text


def test_item_with_a_new_id_at_the_same_index_is_the_same_item() -> None:
    """An item that finishes with another id than it started with is one block."""
    events = [
        ItemStarted("message", "msg_a", 0),
        TextDelta("hi", "msg_b", 0),
        ItemCompleted(message_item("hi", "msg_c"), 0),
        ResponseCompleted("resp_1", output=(message_item("hi", "msg_d"),)),
    ]
    assert list(assemble(events).blocks) == [assistant("hi")]


def test_two_items_with_the_same_index() -> None:
    """Items with different ids but the same output index are separate blocks, and their events tell them apart."""
    stream: list[Message] = []
    for kind in ("added", "done"):
        for item_id, text in (("msg_a", "one"), ("msg_b", "two")):
            item = message_item(text, item_id)
            stream.append({"type": f"response.output_item.{kind}", "output_index": 0, "item": item})
            if kind == "added":
                place = {"item_id": item_id, "output_index": 0, "content_index": 0}
                stream.append({"type": "response.output_text.delta", **place, "delta": text})
    for output in ([], [message_item("one", "msg_a"), message_item("two", "msg_b")]):
        end = {"id": "resp_1", "status": "completed", "output": output}
        events = decode(encode_sse([*stream, {"type": "response.completed", "response": end}]))
        shown = [(e.delta, e.output_index) for e in events if isinstance(e, TextDelta)]
        assert shown == [("one", 0), ("two", 1)]
        assert list(assemble(events).blocks) == [assistant("one"), assistant("two")]


def test_two_messages_with_the_same_id() -> None:
    """Messages with the same id but different output indexes are separate blocks."""
    events = [
        ItemStarted("message", "m", 0),
        TextDelta("one", "m", 0),
        ItemCompleted(message_item("one", "m"), 0),
        ItemStarted("message", "m", 1),
        TextDelta("two", "m", 1),
        ItemCompleted(message_item("two", "m"), 1),
    ]
    for output in (None, (message_item("one", "m"), message_item("two", "m"))):
        result = assemble([*events, ResponseCompleted("resp_1", output=output)])
        assert list(result.blocks) == [assistant("one"), assistant("two")]


def test_items_only_in_the_finished_response_are_read() -> None:
    """Items that are only in the finished response are added at their position."""
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    events = [
        TextDelta("hi", "msg_1", 1),
        ItemCompleted(message_item("hi"), 1),
        ResponseCompleted("resp_1", output=(search, message_item("hi"))),
    ]
    assert list(assemble(events).blocks) == [opaque(search), assistant("hi")]


def test_listed_item_completes_deltas() -> None:
    """An item in the finished response completes a streamed item with missing deltas."""
    events = [
        AnomalyNoted("gap"),
        TextDelta("hel", "msg_1", 0),
        ResponseCompleted("resp_1", output=(message_item("hello"),)),
    ]
    result = assemble(events)
    assert result.completed
    assert list(result.blocks) == [assistant("hello")]


def test_streamed_item_overrides_the_listed_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A finished streamed item overrides a different listed one and is logged, unless only the id differs."""
    end = ResponseCompleted("resp_1", output=(message_item("other"),))
    assert list(assemble([ItemCompleted(message_item("this"), 0), end]).blocks) == [
        assistant("this")
    ]
    assert "differs between the stream and the finished response" in caplog.text
    caplog.clear()
    end = ResponseCompleted("resp_1", output=(message_item("this", "msg_9", status="completed"),))
    assert list(assemble([ItemCompleted(message_item("this"), 0), end]).blocks) == [
        assistant("this")
    ]
    assert caplog.text == ""


def replay_items(streamed: list[dict[str, Any]], listed: list[dict[str, Any]]) -> Outcome:
    """Decode and assemble finished items, and the response that lists its items once more."""
    done = [
        {"type": "response.output_item.done", "output_index": index, "item": item}
        for index, item in enumerate(streamed)
    ]
    response = {"id": "resp_1", "status": "completed", "output": listed}
    return replay([*done, {"type": "response.completed", "response": response}])


CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "t", "arguments": "{}"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": []}


@for_each(
    ("streamed", "listed", "problem"),
    [
        ([message_item("this")], [message_item("other")], "differs"),
        ([message_item("this"), CALL], [message_item("this")], "lists other items"),
        ([message_item("this"), CALL], [CALL, message_item("this")], "lists other items"),
        ([message_item("this")], [message_item("this")], ""),
        ([message_item("this")], [message_item("this", "msg_9", status="completed")], ""),
        ([message_item("this")], [message_item("this"), CALL], ""),
        ([REASONING, message_item("this")], [message_item("this")], ""),
        ([message_item("this")], [], ""),
    ],
)
def test_response_that_differs_from_its_stream_is_not_an_anchor(
    streamed: list[dict[str, Any]], listed: list[dict[str, Any]], problem: str
) -> None:
    """A response that lists other items than its stream is completed but not an anchor."""
    result = replay_items(streamed, listed)
    assert result.completed
    assert problem in result.anchor_problem
    assert bool(problem) == bool(result.anchor_problem)


@pytest.mark.parametrize("kind", ["contradiction", "replaced_text"])
def test_content_anomaly_prevents_an_anchor(kind: Any) -> None:
    """A response with a content anomaly is completed, but not an anchor, as the stored one may differ."""
    events = [TextDelta("hi", "msg_1", 0), AnomalyNoted(kind, "why"), COMPLETED]
    result = assemble(events)
    assert result.completed
    assert result.anchor_problem == "why"


def test_call_with_a_fallback_id_prevents_an_anchor() -> None:
    """A response with a call under a fallback id, unknown to the server, is not an anchor."""
    started = ToolCallStarted("fc_1", "t", "fc_1", 0, fallback="missing")
    finished = ToolCallCompleted("fc_1", "t", "{}", "fc_1", 0)
    assert "call_id" in assemble([started, finished, COMPLETED]).anchor_problem
    renamed = ToolCallRenamed("call_1", "fc_1")
    assert assemble([started, renamed, COMPLETED]).anchor_problem == ""


def test_listed_items_with_other_ids_are_not_duplicated() -> None:
    """Listed items are matched by id, then by index and type, then by order and type."""
    calls = [
        {"type": "function_call", "id": f"fc_{n}", "call_id": f"call_{n}", "name": "t"}
        for n in range(3)
    ]
    calls = [{**call, "arguments": f"[{n}]"} for n, call in enumerate(calls)]
    anonymous = [{**call, "id": f"x{n}", "call_id": f"y{n}"} for n, call in enumerate(calls)]
    result = replay_items([REASONING, *calls], anonymous)
    assert [block.kind for block in result.blocks] == ["reasoning"] + ["tool_call"] * 3


# The status of the outcome.


@for_each(
    ("ending", "status"),
    [
        ([], "cut"),
        ([COMPLETED], "completed"),
        ([ResponseIncomplete("resp_1", reason="max_output_tokens")], "incomplete"),
        ([ResponseFailed("resp_1", code="server_error")], "failed"),
        ([StreamFailed("rate_limit_exceeded")], "failed"),
        ([StreamFailed("oops"), COMPLETED], "failed"),
        ([StreamFailed("oops"), ResponseIncomplete("resp_1")], "failed"),
        ([ResponseFailed("resp_1"), COMPLETED], "failed"),
    ],
)
def test_status_of_each_ending(ending: list[StreamEvent], status: str) -> None:
    """Only ``ResponseCompleted`` without an earlier failure is success."""
    result = assemble([TextDelta("hi", "m", 0), *ending])
    assert result.status == status
    assert result.completed == (status == "completed")
    assert list(result.blocks) == [assistant("hi")]
    assert (result.blocks[0].metadata.get("kedge.partial") is True) == (status != "completed")


def test_failure_message_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The code of a failure is logged; its message is only in the outcome."""
    caplog.set_level(logging.DEBUG)
    result = assemble([StreamFailed("oops", "secret details"), ResponseFailed("resp_1")])
    assert (result.code, result.message) == ("oops", "secret details")
    assert "secret" not in caplog.text
    assert "oops" in caplog.text


def test_a_failure_has_the_message_of_the_response() -> None:
    """The code and message of the final event override those of an earlier failure."""
    result = assemble([StreamFailed("a", "b"), ResponseFailed("resp_1", code="c", message="d")])
    assert (result.code, result.message) == ("c", "d")


@for_each(
    "stream",
    [
        [AnomalyNoted("malformed", "x"), ItemCompleted(message_item("hi"), 0), COMPLETED],
        [AnomalyNoted("gap", "x"), TextDelta("hi", "m", 0), COMPLETED],
        [AnomalyNoted("gap", "x"), ItemCompleted(message_item("hi"), 1), COMPLETED],
        [AnomalyNoted("late", "x"), ToolCallCompleted("call_1", "t", "{}"), COMPLETED],
        [AnomalyNoted("unresolved_call", "x"), ItemCompleted(message_item("hi"), 0), COMPLETED],
        [ItemStarted("web_search_call", "ws_1", 0), TextDelta("hi", "m", 1), COMPLETED],
        [ToolCallStarted("call_1", "t", "fc_1", 0), ToolArgumentsDelta("call_1", "{}"), COMPLETED],
        [ItemCompleted({"type": "tomorrow", "n": float("inf")}, 0), COMPLETED],
        [ItemCompleted({"type": 7}, 0), COMPLETED],
    ],
)
def test_damaged_stream_is_a_failure(stream: list[StreamEvent]) -> None:
    """A response with missing or invalid content is a failure, even if the server reports it as completed."""
    result = assemble(stream)
    assert (result.status, result.code) == ("failed", "damaged_stream")
    assert result.message


def test_anomaly_is_ignored_if_the_item_is_complete() -> None:
    """A late or missing delta is ignored if its item finished completely."""
    events = [
        AnomalyNoted("gap"),
        AnomalyNoted("late"),
        TextDelta("h", "msg_1", 0),
        ItemCompleted(message_item("hi"), 0),
        COMPLETED,
    ]
    assert assemble(events).completed


def test_empty_item_creates_no_block() -> None:
    """A message or reasoning item without content creates no block, even if it never finishes."""
    result = assemble([ItemStarted("message", "m", 0), ItemStarted("reasoning", "r", 1), COMPLETED])
    assert result.completed
    assert result.blocks == ()


def test_response_without_an_id() -> None:
    """The response id is an empty string, and the blocks are not tagged."""
    result = assemble([TextDelta("hi", "m", 0), ResponseCompleted()])
    assert result.response_id == ""
    assert "response_id" not in result.blocks[0].metadata


def test_last_event_overrides_earlier_ones() -> None:
    """Values of the final event override those of the first, which are used if it has none."""
    start = ResponseStarted("resp_1", "m1", 5.0, "resp_0", echoed=True)
    result = assemble([start, ResponseCompleted("resp_2", "m2", 6.0, None, echoed=True)])
    assert (result.response_id, result.model, result.created_at) == ("resp_2", "m2", 6.0)
    assert (result.previous_response_id, result.echoed) == (None, True)
    result = assemble([start, ResponseCompleted()])
    assert (result.response_id, result.model, result.created_at) == ("resp_1", "m1", 5.0)
    assert (result.previous_response_id, result.echoed) == ("resp_0", True)


def test_blocks_can_be_read_while_streaming() -> None:
    """Block ids are the same while streaming and in the outcome."""
    assembler = Assembler()
    assembler.feed(ItemCompleted(message_item("one"), 0))
    assembler.feed(TextDelta("tw", "msg_2", 1))
    assert list(assembler.blocks()) == [assistant("one"), assistant("tw")]
    early = [block.id for block in assembler.blocks()]
    assembler.feed(TextDelta("o", "msg_2", 1))
    assembler.feed(COMPLETED)
    outcome = assembler.finish()
    assert [block.id for block in outcome.blocks] == early
    assert list(outcome.blocks) == [assistant("one"), assistant("two")]


def test_whole_blocks_exclude_partial_content() -> None:
    """``whole_blocks`` of a cut stream contains only blocks of finished items."""
    events = read_messages("reasoning_and_call")
    result = replay(events[:-4])
    assert [block.kind for block in result.blocks] == ["reasoning", "tool_call"]
    assert [block.kind for block in result.whole_blocks] == ["reasoning"]


def test_content_that_is_encrypted_anew_is_no_contradiction() -> None:
    """A compaction whose ciphertext differs between its end and the end of the response can be an anchor."""
    streamed, listed = (
        {"type": "compaction", "id": "cmp_1", "encrypted_content": text} for text in ("a", "b")
    )
    outcome = assemble([ItemCompleted(streamed, 0), structs.replace(COMPLETED, output=(listed,))])
    assert outcome.blocks == (opaque(streamed),)
    assert outcome.anchor_problem == ""
    other = {**listed, "summary": "Something else."}
    outcome = assemble([ItemCompleted(streamed, 0), structs.replace(COMPLETED, output=(other,))])
    assert "differs in the finished response" in outcome.anchor_problem


def test_an_error_that_ends_a_stream_may_have_usage() -> None:
    """The tokens of a stream that ends with an error are counted."""
    outcome = assemble([StreamFailed("400", "Token limit reached", usage=Usage(43, 0, 10))])
    assert (outcome.status, outcome.usage) == ("failed", Usage(43, 0, 10))


@pytest.mark.parametrize("annotations", [1, 1.5, True, "a", {"a": 1}])
def test_annotations_of_another_type_do_not_raise(annotations: Any) -> None:
    """A listed message with annotations that are no array is the streamed one."""
    listed = message_item("Hello", phase="final")
    listed["content"][0]["annotations"] = annotations
    completed = ResponseCompleted("resp_1", status="completed", output=(listed,))
    [block] = assemble([ItemCompleted(message_item("Hello"), 0), completed]).blocks
    assert block.text == "Hello"


def test_annotations_that_only_the_finished_response_lists_are_kept() -> None:
    """A message that gets its annotations at the end has them, and can be an anchor."""
    listed = message_item("Hello")
    listed["content"][0]["annotations"] = [{"type": "url_citation", "url": "https://a.example"}]
    outcome = assemble(
        [ItemCompleted(message_item("Hello"), 0), structs.replace(COMPLETED, output=(listed,))]
    )
    (block,) = outcome.blocks
    assert isinstance(block, AssistantBlock)
    assert block.parts[0].extra["annotations"] == (
        {"type": "url_citation", "url": "https://a.example"},
    )
    assert outcome.anchor_problem == ""
