"""Recorded streams of the Responses API: numbered, damaged and repeated events, and what is read from them."""

from for_each import for_each
from kedge.events import OpaqueEvent
from wire.recorded_streams import EXPECTED
from wire.streams import (
    TRANSCRIPT_NAMES,
    Message,
    decode,
    encode_sse,
    read_messages,
    read_transcript,
    replay,
)

all_transcripts = for_each("name", TRANSCRIPT_NAMES)
numbered_transcripts = for_each(
    "name", [name for name in TRANSCRIPT_NAMES if name not in ("plain_server", "llama_cpp")]
)


@all_transcripts
def test_a_stream_without_output_indexes_gives_the_same_events(name: str) -> None:
    """If the server sends no output indexes, the decoder assigns them."""
    messages = [
        {member: value for member, value in message.items() if member != "output_index"}
        for message in read_messages(name)
    ]
    decoded = decode(read_transcript(name))
    assigned = decode(encode_sse(messages))
    assert [each for each in assigned if not isinstance(each, OpaqueEvent)] == [
        each for each in decoded if not isinstance(each, OpaqueEvent)
    ]


@numbered_transcripts
def test_resumed_stream_with_repeated_events_gives_the_same_result(name: str) -> None:
    """A second connection that repeats the last events gives the same events."""
    events = read_messages(name)
    for at in range(1, len(events)):
        repeated = [*events[:at], *events[max(0, at - 4) :]]
        assert decode(encode_sse(repeated)) == decode(read_transcript(name))


def corrupt_event(event: Message) -> Message:
    """Return the event with its content replaced by a value of the wrong type."""
    return {**event, **dict.fromkeys(event.keys() & {"delta", "item", "text", "arguments"}, 7)}


def without_output(event: Message) -> Message:
    """Return the event without the output listed in its response."""
    response = event.get("response")
    return {**event, "response": {**response, "output": []}} if response else event


@numbered_transcripts
@for_each("damage", ["lost", "spoilt"])
@for_each("lists", [True, False])
def test_damaged_event_gives_correct_blocks_or_a_failure(
    name: str, damage: str, lists: bool
) -> None:
    """If any one event is lost or invalid, a completed response still has exactly the expected blocks."""
    status, blocks = EXPECTED[f"responses/{name}"]
    events = read_messages(name)
    if not lists:
        events = [without_output(event) for event in events]
        blocks = [] if name == "all_at_once" else blocks
    for at, event in enumerate(events[:-1]):
        replaced = [] if damage == "lost" else [corrupt_event(event)]
        result = replay([*events[:at], *replaced, *events[at + 1 :]])
        assert result.status in (status, "failed"), at
        if result.completed:
            assert list(result.blocks) == blocks, at
    assert list(replay(events).blocks) == blocks
