"""From events to pieces, one item at a time, however a provider mixes them."""

from collections.abc import Sequence

from events.streams import assemble, decode, read_transcript
from kedge.backends.events_to_items import OutputEmitter, emit_block
from kedge.events import (
    Event,
    Outcome,
    PartCompleted,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallCompleted,
    ToolCallRenamed,
    ToolCallStarted,
    Usage,
)
from kedge.server.models import (
    ItemAdded,
    ItemClosed,
    ItemDelta,
    ItemOpened,
    ModelUsage,
    OutputEvent,
)
from kedge.server.output_writer import OutputWriter
from kedge.turns import Block, opaque, tool_call


def convert_events(events: Sequence[Event], blocks: tuple[Block, ...] = ()) -> list[OutputEvent]:
    """Tell some events, and the end of the answer."""
    telling = OutputEmitter("before")
    pieces = [piece for event in events for piece in telling.feed(event)]
    outcome = Outcome("completed", blocks, usage=Usage(1, 0, 2))
    return [*pieces, *telling.finish(outcome)]


def summarize_items(pieces: Sequence[OutputEvent]) -> list[tuple[str, str]]:
    """The items that pieces make: each kind or name, and its text."""
    items: list[tuple[str, str]] = []
    is_open = False
    for piece in pieces:
        if isinstance(piece, ItemOpened):
            assert not is_open
            is_open = True
            items.append((piece.name or piece.kind, ""))
        elif isinstance(piece, ItemDelta):
            assert is_open
            items[-1] = (items[-1][0], items[-1][1] + piece.text)
        elif isinstance(piece, ItemClosed):
            assert is_open
            is_open = False
    assert not is_open
    return items


def test_text_is_streamed_as_written() -> None:
    """A thought ends where the text begins, and the text where a call does."""
    pieces = convert_events(
        [
            ReasoningDelta("Hm", "reasoning", output_index=0),
            TextDelta("Hel", output_index=1),
            TextDelta("lo", output_index=1),
            ToolCallStarted("c1", "f", output_index=2),
            ToolArgumentsDelta("c1", "{}"),
            ToolCallCompleted("c1", "f", "{}", output_index=2),
        ]
    )
    assert pieces[:5] == [
        ItemOpened("reasoning"),
        ItemDelta("Hm"),
        ItemClosed(),
        ItemOpened("text"),
        ItemDelta("Hel"),
    ]
    assert summarize_items(pieces) == [("reasoning", "Hm"), ("text", "Hello"), ("f", "{}")]
    assert pieces[-1] == ModelUsage(1, 2)


def test_calls_that_are_written_at_once_come_one_after_another() -> None:
    """What is written beside an open call waits for its end."""
    pieces = convert_events(
        [
            ToolCallStarted("c1", "f", output_index=0),
            ToolCallStarted("c2", "g", output_index=1),
            ToolArgumentsDelta("c2", '{"b"'),
            ToolArgumentsDelta("c1", '{"a"'),
            TextDelta("aside", output_index=2),
            ToolArgumentsDelta("c2", ":2}"),
            ToolArgumentsDelta("c1", ":1}"),
            ToolCallCompleted("c1", "f", '{"a":1}', output_index=0),
            ToolCallCompleted("c2", "g", '{"b":2}', output_index=1),
        ]
    )
    assert summarize_items(pieces) == [("f", '{"a":1}'), ("g", '{"b":2}'), ("text", "aside")]


def test_calls_that_never_end_are_ended_with_the_answer() -> None:
    """As from servers that do not say when a call is whole."""
    pieces = convert_events(
        [
            ToolCallStarted("c1", "f", output_index=0),
            ToolArgumentsDelta("c1", "{}"),
            ToolCallStarted("c2", "g", output_index=1),
        ]
    )
    assert summarize_items(pieces) == [("f", "{}"), ("g", "")]


def test_call_retains_its_name() -> None:
    """A client has seen the first id, and answers by it."""
    pieces = convert_events(
        [
            ToolCallStarted("made_up", "f", output_index=0),
            ToolCallRenamed("c1", was="made_up"),
            ToolArgumentsDelta("c1", "{}"),
            ToolCallCompleted("c1", "f", "{}", output_index=0),
        ]
    )
    assert pieces[0] == ItemOpened("function_call", "f", "made_up")
    assert summarize_items(pieces) == [("f", "{}")]


def test_missing_stream_parts_are_sent_at_the_end() -> None:
    """The rest of a part, and whole items that only the finished answer has."""
    late = tool_call("g", "{}", call_id="c9").with_metadata(output_index=7)
    pieces = convert_events(
        [TextDelta("Hel", output_index=0), PartCompleted("text", "Hello", output_index=0)],
        (late,),
    )
    assert summarize_items(pieces) == [("text", "Hello"), ("g", "{}")]


def test_an_item_of_another_type_is_passed_on() -> None:
    """Only the Responses API can tell it, and it does."""
    search = opaque({"type": "web_search_call", "id": "ws_1", "status": "completed"})
    pieces = list(emit_block(search, ""))
    assert isinstance(pieces[0], ItemAdded)
    writer = OutputWriter("0" * 32, 0)
    events = [event for piece in pieces for event in writer.feed(piece)]
    assert [event["type"] for event in events] == [
        "response.output_item.added",
        "response.output_item.done",
    ]
    assert writer.items[0]["id"] == "ws_1"


def test_a_stream_without_output_indexes_gives_every_item_once() -> None:
    """llama.cpp sends no `output_index`; its message and calls were emitted twice."""
    events = decode(read_transcript("llama_cpp"))
    pieces = convert_events(events, assemble(events).blocks)
    assert summarize_items(pieces) == [
        ("reasoning", "Two cities, two calls."),
        ("text", "Let me look."),
        ("get_weather", '{"city":"Bern"}'),
        ("get_weather", '{"city":"Basel"}'),
    ]
