"""The transcripts of every API give the same blocks in any chunks, and a partial response is never completed."""

import json
import re

from for_each import for_each
from kedge.events import ReasoningDelta, RefusalDelta, TextDelta
from kedge.turns import ToolCallBlock
from wire.recorded_streams import (
    DECODERS,
    EXPECTED,
    PATHS,
    block_contents,
    block_text,
    decode,
    decode_outcome,
    make_decoder,
    normalize,
    read_bytes,
    split_messages,
)
from wire.streams import assemble, choose_cuts, encode_sse

FINISH_MARKERS = {
    "responses": '"type":"(response.(completed|incomplete|failed)|error)"',
    "chat": '"finish_reason":"',
    "anthropic": '"message_stop"',
}
"""A pattern of the message that ends an answer of each API."""

all_transcripts = for_each("name", PATHS)


def test_every_transcript_has_an_expected_result() -> None:
    """Every transcript has an expected result, and every expected result a transcript."""
    assert sorted(EXPECTED) == sorted(PATHS)


@all_transcripts
def test_transcript_gives_the_expected_blocks(name: str) -> None:
    """Each gives the expected status, and blocks in order with origin and response id, whose text is in the deltas."""
    status, blocks = EXPECTED[name]
    events = decode(name, read_bytes(name))
    result = assemble(events)
    assert (result.status, block_contents(result.blocks)) == (status, block_contents(blocks))
    assert result.response_id
    deltas = [
        each for each in events if isinstance(each, TextDelta | RefusalDelta | ReasoningDelta)
    ]
    for at, block in enumerate(result.blocks):
        assert (block.origin, block.response_id) == ("engine", result.response_id)
        assert block.output_index == at
        shown = "".join(each.delta for each in deltas if each.output_index == at)
        written = (*getattr(block, "summary", ()), block_text(block))
        if not isinstance(block, ToolCallBlock) and name != "responses/all_at_once":
            assert shown == "".join(written)


@all_transcripts
def test_stream_fed_byte_by_byte_gives_the_same_events(name: str) -> None:
    """A stream fed one byte at a time gives the same events."""
    stream = read_bytes(name)
    chunks = [stream[at : at + 1] for at in range(len(stream))]
    assert normalize(decode(name, *chunks)) == normalize(decode(name, stream))


@all_transcripts
def test_messages_as_text_or_objects_give_the_same_events(name: str) -> None:
    """Messages fed as text or as objects give the same events as the stream."""
    data = [
        line.removeprefix("data: ")
        for line in read_bytes(name).decode().splitlines()
        if line.startswith("data: {")
    ]
    expected = normalize(decode(name, read_bytes(name)))
    for messages in (data, [json.loads(each) for each in data]):
        decoder = make_decoder(name)
        events = [event for each in messages for event in decoder.feed_message(each)]
        assert normalize(events + decoder.close()) == expected


@all_transcripts
def test_a_stream_cut_at_any_message_is_never_complete(name: str) -> None:
    """Before the finish message the response is not completed, and its blocks are a prefix."""
    status, blocks = EXPECTED[name]
    messages = split_messages(name)
    mark = FINISH_MARKERS[name.partition("/")[0]].encode()
    end = next(
        (at for at, message in enumerate(messages) if re.search(mark, message)), len(messages)
    )
    for at in range(len(messages)):
        result = decode_outcome(name, *messages[:at])
        if at <= end:
            assert result.status in ("cut", "failed" if status == "failed" else "cut"), at
        texts = [block_text(block) for block in blocks]
        for block in result.blocks:
            position = block.output_index
            assert isinstance(position, int)
            if block.metadata.get("kedge.partial"):
                assert block not in result.whole_blocks
                assert texts[position].startswith(block_text(block))
            else:
                assert block_contents([block]) == block_contents([blocks[position]])


@all_transcripts
def test_a_stream_cut_at_any_byte_has_the_events_of_its_complete_messages(name: str) -> None:
    """An incomplete message at the end is ignored, unless only its line end is missing."""
    stream = read_bytes(name)
    messages = split_messages(name)
    ends = [0]
    for message in messages:
        ends.append(ends[-1] + len(message))
    known = [normalize(decode(name, stream[:end])) for end in ends]
    for at in choose_cuts(stream)[:-1]:
        complete = max(index for index, end in enumerate(ends) if end <= at)
        near = min(complete + 1, len(messages))
        assert normalize(decode(name, stream[:at])) in (known[complete], known[near])


@all_transcripts
def test_unknown_messages_do_not_change_the_outcome(name: str) -> None:
    """Messages of an unknown type do not change the blocks and the status."""
    unknown = encode_sse(
        [{"type": "tomorrow", "object": "tomorrow", "delta": {"deep": [1]}, "index": 99}]
    )
    noise = b": ping\n\nevent: keepalive\ndata: still here\n\ndata:\n\n" + unknown
    interleaved = b"".join(noise + message for message in split_messages(name))
    assert block_contents(decode_outcome(name, interleaved).blocks) == block_contents(
        decode_outcome(name, read_bytes(name)).blocks
    )
    assert decode_outcome(name, interleaved).status == EXPECTED[name][0]


@all_transcripts
def test_unreadable_message_gives_correct_blocks_or_a_failure(name: str) -> None:
    """If any one message is unreadable, a completed response still has exactly the expected blocks."""
    _, blocks = EXPECTED[name]
    messages = split_messages(name)
    for at, message in enumerate(messages):
        if b"data: {" not in message:
            continue
        result = decode_outcome(name, *messages[:at], b'data: {"id": \n\n', *messages[at + 1 :])
        if result.completed:
            assert block_contents(result.blocks) == block_contents(blocks), at


@for_each("api", DECODERS)
@for_each(
    ("event", "is_reported"), [("", True), ("message", True), ("error", True), ("ping", False)]
)
def test_events_of_the_api_must_be_json(api: str, event: str, is_reported: bool) -> None:
    """An event without a name, with the default name or of an error must be JSON; others may be keep-alives."""
    found = DECODERS[api]().feed(f"event: {event}\ndata: cut {{\n\n".encode())
    assert [getattr(each, "kind", "") for each in found] == ["malformed"] * is_reported
