"""Test the conversion of engine events to output items, one item at a time, for interleaved events."""

from collections.abc import Sequence

from kedge.backends.items import OutputEmitter, emit_block
from kedge.events import (
    Event,
    ItemCompleted,
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
from kedge.turns import Block, Source, opaque, reasoning, tool_call


def convert_events(*events: Event, blocks: tuple[Block, ...] = ()) -> list[OutputEvent]:
    """Convert these events and the end of the answer to output events."""
    emitter = OutputEmitter("before")
    output = [output_event for event in events for output_event in emitter.feed(event)]
    outcome = Outcome("completed", blocks, usage=Usage(1, 0, 2))
    return [*output, *emitter.finish(outcome)]


def summarize_items(output: Sequence[OutputEvent]) -> list[tuple[str, str]]:
    """Return the kind or name and the text of each item in these output events."""
    items: list[tuple[str, str]] = []
    is_open = False
    for output_event in output:
        if isinstance(output_event, ItemOpened):
            assert not is_open
            is_open = True
            items.append((output_event.name or output_event.kind, ""))
        elif isinstance(output_event, ItemDelta):
            assert is_open
            items[-1] = (items[-1][0], items[-1][1] + output_event.text)
        elif isinstance(output_event, ItemClosed):
            assert is_open
            is_open = False
    assert not is_open
    return items


def test_items_are_streamed_in_order() -> None:
    """Reasoning is closed when the text starts, and the text is closed when a call starts."""
    output = convert_events(
        ReasoningDelta("Hm", "reasoning", output_index=0),
        TextDelta("Hel", output_index=1),
        TextDelta("lo", output_index=1),
        ToolCallStarted("c1", "f", output_index=2),
        ToolArgumentsDelta("c1", "{}"),
        ToolCallCompleted("c1", "f", "{}", output_index=2),
    )
    assert output[:3] == [ItemOpened("reasoning"), ItemDelta("Hm"), ItemClosed()]
    assert output[3:5] == [ItemOpened("text"), ItemDelta("Hel")]
    assert summarize_items(output) == [("reasoning", "Hm"), ("text", "Hello"), ("f", "{}")]
    assert output[-1] == ModelUsage(1, 2)


def test_reasoning_without_text_keeps_its_position() -> None:
    """Encrypted reasoning has no deltas and is emitted before the message; inside a call, at the end."""
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "seal"}
    text = TextDelta("Hello", output_index=1)
    output = convert_events(ItemCompleted(item, 0), text)
    assert summarize_items(output) == [("reasoning", ""), ("text", "Hello")]
    late = reasoning(encrypted_content="seal").with_source(Source(output_index=1))
    call = ToolCallStarted("c1", "f", output_index=0)
    output = convert_events(call, ItemCompleted(item, 1), blocks=(late,))
    assert summarize_items(output) == [("f", ""), ("reasoning", "")]


def test_interleaved_calls_are_emitted_one_after_another() -> None:
    """Output that arrives while a call is open is held back until the call is closed."""
    output = convert_events(
        ToolCallStarted("c1", "f", output_index=0),
        ToolCallStarted("c2", "g", output_index=1),
        ToolArgumentsDelta("c2", '{"b"'),
        ToolArgumentsDelta("c1", '{"a"'),
        TextDelta("aside", output_index=2),
        ToolArgumentsDelta("c2", ":2}"),
        ToolArgumentsDelta("c1", ":1}"),
        ToolCallCompleted("c1", "f", '{"a":1}', output_index=0),
        ToolCallCompleted("c2", "g", '{"b":2}', output_index=1),
    )
    assert summarize_items(output) == [("f", '{"a":1}'), ("g", '{"b":2}'), ("text", "aside")]


def test_unfinished_calls_are_closed_with_the_answer() -> None:
    """Calls of servers that do not report when a call is complete are closed at the end of the answer."""
    output = convert_events(
        ToolCallStarted("c1", "f", output_index=0),
        ToolArgumentsDelta("c1", "{}"),
        ToolCallStarted("c2", "g", output_index=1),
    )
    assert summarize_items(output) == [("f", "{}"), ("g", "")]


def test_renamed_call_retains_its_first_id() -> None:
    """A renamed call retains its first id, because a client has seen it and sends the result with it."""
    output = convert_events(
        ToolCallStarted("made_up", "f", output_index=0),
        ToolCallRenamed("c1", was="made_up"),
        ToolArgumentsDelta("c1", "{}"),
        ToolCallCompleted("c1", "f", "{}", output_index=0),
    )
    assert output[0] == ItemOpened("function_call", "f", "made_up")
    assert summarize_items(output) == [("f", "{}")]


def test_missing_stream_parts_are_sent_at_the_end() -> None:
    """The rest of a part and items that only the finished answer contains are sent at the end."""
    late = tool_call("g", "{}", call_id="c9").with_source(Source(output_index=7))
    output = convert_events(
        TextDelta("Hel", output_index=0),
        PartCompleted("text", "Hello", output_index=0),
        blocks=(late,),
    )
    assert summarize_items(output) == [("text", "Hello"), ("g", "{}")]


def test_an_item_of_another_type_is_passed_on() -> None:
    """An item type that only the Responses API has is passed on unchanged."""
    search = opaque({"type": "web_search_call", "id": "ws_1", "status": "completed"})
    output = list(emit_block(search, ""))
    assert isinstance(output[0], ItemAdded)
    writer = OutputWriter("0" * 32, 0)
    events = [event for output_event in output for event in writer.feed(output_event)]
    assert [event["type"] for event in events] == [
        "response.output_item.added",
        "response.output_item.done",
    ]
    assert writer.items[0]["id"] == "ws_1"
