"""Assembling events of any provider into blocks, and the status of the outcome."""

from typing import Any

import pytest

from for_each import for_each
from kedge.events import (
    AnomalyNoted,
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
)
from kedge.turns import (
    AssistantBlock,
    Block,
    RefusalPart,
    assistant,
    opaque,
    reasoning,
    tool_call,
)
from kedge.wire import Assembler
from wire.streams import (
    Message,
    assemble,
    decode,
    encode_sse,
    item_event,
    message_item,
    replay,
    response_event,
)

COMPLETED = ResponseCompleted("resp_1", status="completed")


def done(text: str, at: int = 0, item_id: str = "m") -> ItemCompleted:
    """Return the end of a message."""
    return ItemCompleted(message_item(text, item_id), at)


def listing(*items: dict[str, Any]) -> ResponseCompleted:
    """Return the end of a response that lists these items."""
    return ResponseCompleted("resp_1", status="completed", output=items)


@for_each("listed", [False, True])
def test_a_changed_event_does_not_change_the_block(listed: bool) -> None:
    """Whoever changes an item inside an event changes neither the block nor the digest of its anchor."""
    item = message_item("Hello")
    assembler = Assembler()
    assembler.feed(listing(item) if listed else ItemCompleted(item, 0))
    item["content"][0]["text"] = "Changed"
    if not listed:
        assembler.feed(COMPLETED)
    assert assembler.finish().blocks == (assistant("Hello"),)


def test_an_item_that_is_nested_too_deep_is_rejected() -> None:
    """An item that cannot become a block makes the response a failed one, whatever its depth."""
    nested: list[Any] = []
    for _ in range(900):
        nested = [nested]
    item = ItemCompleted({"type": "other", "id": "x", "value": nested}, 0)
    outcome = assemble([item, TextDelta("hi", "m", 1), COMPLETED])
    assert outcome.status == "failed"
    assert (outcome.blocks, outcome.whole_blocks) == ((assistant("hi"),), ())


# Streams without finished items, as decoders of other providers produce them.


class WeatherEvent(Event, frozen=True):
    """An event type that the assembler does not know."""

    sky: str


SEARCH = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
FALLBACK_CALL = {"type": "function_call", "id": "fc_1", "call_id": "fc_1", "name": "roll"}
TWO_MESSAGES: list[StreamEvent] = [
    *(ItemStarted("message", "m", 0), TextDelta("one", "m", 0), done("one", 0, "m")),
    *(ItemStarted("message", "m", 1), TextDelta("two", "m", 1), done("two", 1, "m")),
]
STREAMS: dict[str, tuple[list[Any], list[Block]]] = {
    "blocks without an index are in order of arrival": (
        [
            *(ReasoningDelta("first", "summary"), TextDelta("sec")),
            *(ToolCallCompleted("call_1", "third", ""), TextDelta("ond")),
        ],
        [reasoning("first"), assistant("second"), tool_call("third", "", call_id="call_1")],
    ),
    "parts are ordered by their index": (
        [
            *(RefusalDelta("no", "m", 0, 1), TextDelta("well, ", "m", 0, 0)),
            *(ReasoningDelta("b", "summary", "r", 1, 1), ReasoningDelta("a", "summary", "r", 1, 0)),
            ReasoningDelta("t", "reasoning", "r", 1, 0),
        ],
        [assistant(["well, ", RefusalPart("no")]), reasoning(["a", "b"], text="t")],
    ),
    "an empty final text, as of some servers, does not erase deltas": (
        [TextDelta("words", "m", 0), PartCompleted("text", "", "m", 0)],
        [assistant("words")],
    ),
    "a surrogate pair that is split over two deltas is one character": (
        [TextDelta("\ud83d", "m", 0), TextDelta("\ude00", "m", 0)],
        [assistant("\U0001f600")],
    ),
    "a call is found by both ids before and after it is renamed": (
        [
            ToolCallStarted("fc_1", "roll", "fc_1", 0, fallback="missing"),
            ToolArgumentsDelta("fc_1", "{"),
            ItemCompleted({**FALLBACK_CALL, "arguments": "{}"}, 0),
            *(ToolCallRenamed("call_1", "fc_1"), ToolArgumentsDelta("call_1", "}")),
        ],
        [tool_call("roll", "{}", call_id="call_1")],
    ),
    "arguments or a new id of an unknown call create no block": (
        [ToolArgumentsDelta("call_x", "{}"), ToolCallRenamed("call_y", "call_x")],
        [],
    ),
    "unknown events are ignored": (
        [WeatherEvent("blue"), OpaqueEvent("response.tomorrow"), TextDelta("hi")],
        [assistant("hi")],
    ),
    "an item that ends with another id than it started with is one block": (
        [
            *(ItemStarted("message", "msg_a", 0), TextDelta("hi", "msg_b", 0)),
            *(done("hi", 0, "msg_c"), listing(message_item("hi", "msg_d"))),
        ],
        [assistant("hi")],
    ),
    "messages with one id at different indexes": (
        TWO_MESSAGES,
        [assistant("one"), assistant("two")],
    ),
    "messages with one id at different indexes that are listed": (
        [*TWO_MESSAGES, listing(message_item("one", "m"), message_item("two", "m"))],
        [assistant("one"), assistant("two")],
    ),
    "items that are only listed are added at their position": (
        [TextDelta("hi", "m", 1), done("hi", 1), listing(SEARCH, message_item("hi"))],
        [opaque(SEARCH), assistant("hi")],
    ),
    "a listed item completes one with missing deltas": (
        [AnomalyNoted("gap"), TextDelta("hel", "m", 0), listing(message_item("hello"))],
        [assistant("hello")],
    ),
    "a late or missing delta of a complete item is ignored": (
        [AnomalyNoted("gap"), AnomalyNoted("late"), TextDelta("h", "m", 0), done("hi")],
        [assistant("hi")],
    ),
    "items without content create no block, even if they never end": (
        [ItemStarted("message", "m", 0), ItemStarted("reasoning", "r", 1)],
        [],
    ),
}


@for_each("name", STREAMS)
def test_events_give_blocks(name: str) -> None:
    """Events belong to a block by item id, index and order of arrival; what is complete outweighs deltas."""
    events, expected = STREAMS[name]
    result = assemble(events if isinstance(events[-1], ResponseCompleted) else [*events, COMPLETED])
    assert result.completed
    assert list(result.blocks) == expected
    assert [block.output_index for block in result.blocks] == list(range(len(expected)))


@for_each(
    ("events", "blocks", "logged"),
    [
        (
            [
                TextDelta("secret pass", "m", 0),
                PartCompleted("text", "secret password", "m", 0),
                TextDelta("!", "m", 0),
                PartCompleted("text", "", "m", 0),
                PartCompleted("summary", "thought", "r", 1),
            ],
            [assistant("secret password"), reasoning("thought")],
            "differs from its deltas (11 characters)",
        ),
        ([done("one"), done("two secret")], [assistant("one")], "the streamed version is used"),
        (
            [done("this"), listing(message_item("secret"))],
            [assistant("this")],
            "differs between the stream and the finished response",
        ),
        (
            [PartCompleted("text", each, "m", 0, 0) for each in ("this", "secret")],
            [assistant("this")],
            "",
        ),
        (
            [done("this"), listing(message_item("this", "msg_9", status="completed"))],
            [assistant("this")],
            "",
        ),
    ],
)
def test_the_first_complete_version_is_used(
    events: list[StreamEvent], blocks: list[Block], logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A final text overrides deltas, and a finished item other versions; a difference is logged without content."""
    caplog.clear()
    assert list(assemble([*events, COMPLETED]).blocks) == blocks
    assert logged in caplog.text
    assert bool(logged) == bool(caplog.text)
    assert "secret" not in caplog.text


# Finished items.


def test_two_items_with_the_same_index() -> None:
    """Items with different ids but the same output index are separate blocks, and their events tell them apart."""
    items = [message_item("one", "msg_a"), message_item("two", "msg_b")]
    stream: list[Message] = []
    for item in items:
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        delta = {"type": "response.output_text.delta", "delta": item["content"][0]["text"]}
        stream += [item_event("added", item), {**delta, **place}]
    stream += [item_event("done", item) for item in items]
    for output in ([], items):
        events = decode(encode_sse([*stream, response_event("completed", output=output)]))
        shown = [(e.delta, e.output_index) for e in events if isinstance(e, TextDelta)]
        assert shown == [("one", 0), ("two", 1)]
        assert list(assemble(events).blocks) == [assistant("one"), assistant("two")]


def replay_items(streamed: list[dict[str, Any]], listed: list[dict[str, Any]]) -> Outcome:
    """Decode and assemble finished items, and the response that lists its items once more."""
    events = [item_event("done", item, at) for at, item in enumerate(streamed)]
    return replay([*events, response_event("completed", status="completed", output=listed)])


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


@for_each("kind", ["contradiction", "replaced_text"])
def test_content_anomaly_prevents_an_anchor(kind: Any) -> None:
    """A response with a content anomaly is completed, but not an anchor, as the stored one may differ."""
    events = [TextDelta("hi", "m", 0), AnomalyNoted(kind, "why"), COMPLETED]
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


@for_each(
    "stream",
    [
        [AnomalyNoted("malformed", "x"), done("hi"), COMPLETED],
        [AnomalyNoted("gap", "x"), TextDelta("hi", "m", 0), COMPLETED],
        [AnomalyNoted("gap", "x"), done("hi", 1), COMPLETED],
        [AnomalyNoted("late", "x"), ToolCallCompleted("call_1", "t", "{}"), COMPLETED],
        [AnomalyNoted("unresolved_call", "x"), done("hi"), COMPLETED],
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


def test_last_event_overrides_earlier_ones() -> None:
    """Values of the final event override those of the first; of several errors the first counts."""
    start = ResponseStarted("resp_1", "m1", 5.0, "resp_0", echoed=True)
    result = assemble([start, ResponseCompleted("resp_2", "m2", 6.0, None, echoed=True)])
    assert (result.response_id, result.model, result.created_at) == ("resp_2", "m2", 6.0)
    assert (result.previous_response_id, result.echoed) == (None, True)
    result = assemble([start, ResponseCompleted()])
    assert (result.response_id, result.model, result.created_at) == ("resp_1", "m1", 5.0)
    assert (result.previous_response_id, result.echoed) == ("resp_0", True)
    assert assemble([StreamFailed("oops"), StreamFailed("other")]).code == "oops"


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


def test_content_that_is_encrypted_anew_is_no_contradiction() -> None:
    """A compaction whose ciphertext differs between its end and the end of the response can be an anchor."""
    streamed, listed = (
        {"type": "compaction", "id": "cmp_1", "encrypted_content": text} for text in ("a", "b")
    )
    outcome = assemble([ItemCompleted(streamed, 0), listing(listed)])
    assert outcome.blocks == (opaque(streamed),)
    assert outcome.anchor_problem == ""
    outcome = assemble([ItemCompleted(streamed, 0), listing({**listed, "summary": "Other."})])
    assert "differs in the finished response" in outcome.anchor_problem


@for_each("annotations", [1, 1.5, True, "a", {"a": 1}, [{"type": "url_citation", "url": "u"}]])
def test_annotations_that_only_the_finished_response_lists_are_kept(annotations: Any) -> None:
    """A message that gets its annotations at the end has them, unless they are no array, and can be an anchor."""
    listed = message_item("Hello")
    listed["content"][0]["annotations"] = annotations
    outcome = assemble([done("Hello"), listing(listed)])
    (block,) = outcome.blocks
    assert isinstance(block, AssistantBlock)
    assert block.text == "Hello"
    if isinstance(annotations, list):
        assert block.parts[0].extra["annotations"] == tuple(annotations)
        assert outcome.anchor_problem == ""
