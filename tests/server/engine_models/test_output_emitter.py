"""Test the conversion of engine events to output items, one item at a time, for interleaved events."""

from collections.abc import Sequence

from for_each import for_each
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
from kedge.server.engine_models.output_emitter import OutputEmitter
from kedge.server.models import (
    ItemClosed,
    ItemDelta,
    ItemOpened,
    ModelUsage,
    OutputEvent,
)
from kedge.turns import Block, Source, reasoning, tool_call


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


CALL = ToolCallStarted("c1", "f", output_index=0)
ENCRYPTED = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "seal"}
LATE_REASONING = reasoning(encrypted_content="seal").with_source(Source(output_index=1))
LATE_CALL = tool_call("g", "{}", call_id="c9").with_source(Source(output_index=7))
ANSWERS: dict[str, tuple[list[Event], list[Block], list[tuple[str, str]]]] = {
    "an item is closed when the next one starts": (
        [
            ReasoningDelta("Hm", "reasoning", output_index=0),
            TextDelta("Hel", output_index=1),
            TextDelta("lo", output_index=1),
            ToolCallStarted("c1", "f", output_index=2),
            ToolArgumentsDelta("c1", "{}"),
            ToolCallCompleted("c1", "f", "{}", output_index=2),
        ],
        [],
        [("reasoning", "Hm"), ("text", "Hello"), ("f", "{}")],
    ),
    "encrypted reasoning has no deltas and precedes the message": (
        [ItemCompleted(ENCRYPTED, 0), TextDelta("Hello", output_index=1)],
        [],
        [("reasoning", ""), ("text", "Hello")],
    ),
    "encrypted reasoning inside a call is emitted at the end": (
        [CALL, ItemCompleted(ENCRYPTED, 1)],
        [LATE_REASONING],
        [("f", ""), ("reasoning", "")],
    ),
    "output that arrives while a call is open waits": (
        [
            CALL,
            ToolCallStarted("c2", "g", output_index=1),
            ToolArgumentsDelta("c2", '{"b"'),
            ToolArgumentsDelta("c1", '{"a"'),
            TextDelta("aside", output_index=2),
            ToolArgumentsDelta("c2", ":2}"),
            ToolArgumentsDelta("c1", ":1}"),
            ToolCallCompleted("c1", "f", '{"a":1}', output_index=0),
            ToolCallCompleted("c2", "g", '{"b":2}', output_index=1),
        ],
        [],
        [("f", '{"a":1}'), ("g", '{"b":2}'), ("text", "aside")],
    ),
    "calls whose end is not reported are closed at the end": (
        [CALL, ToolArgumentsDelta("c1", "{}"), ToolCallStarted("c2", "g", output_index=1)],
        [],
        [("f", "{}"), ("g", "")],
    ),
    "the rest of a part, and items only in the finished answer, come at the end": (
        [TextDelta("Hel", output_index=0), PartCompleted("text", "Hello", output_index=0)],
        [LATE_CALL],
        [("text", "Hello"), ("g", "{}")],
    ),
}


@for_each("answer", ANSWERS)
def test_items_are_emitted_one_after_another(answer: str) -> None:
    """Each item is complete before the next one starts, in the order of the model's output if possible."""
    received, blocks, expected = ANSWERS[answer]
    output = convert_events(*received, blocks=tuple(blocks))
    assert summarize_items(output) == expected
    assert output[-1] == ModelUsage(1, 2)


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
