"""Recorded streams give the same blocks in any chunks, and a partial response is never completed.

The transcripts have the shape of real streams: text with a split emoji, reasoning and a call,
interleaved parallel calls, a custom tool, a refusal, an incomplete answer, a failure, an error, a web
search, a compaction, an image, an open model's reasoning, a server that sends only deltas, and one that
sends everything in the final event.
"""

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.streams import (
    TRANSCRIPT_NAMES,
    Message,
    choose_cuts,
    decode,
    decode_outcome,
    encode_sse,
    read_messages,
    read_transcript,
    replay,
)
from for_each import for_each
from kedge.events import (
    OpaqueEvent,
    Outcome,
    ReasoningDelta,
    RefusalDelta,
    ResponsesDecoder,
    ResponseStarted,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallCompleted,
    Usage,
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

ENCRYPTED = "gAAAAABencryptedreasoning68a2=="
REASONING_SUMMARIES = ["The user wants the weather.", "I should call the tool."]
PATCH = "*** Begin\n+ naïve\n*** End"
SEARCH = {
    "id": "ws_68a9aa",
    "type": "web_search_call",
    "status": "completed",
    "action": {"type": "search", "query": "kedge anchor"},
}
COMPACTION = {
    "id": "cmp_68b0aa",
    "type": "compaction",
    "encrypted_content": "gAAAAABcompacted==",
}

EXPECTED: dict[str, tuple[str, list[Block]]] = {
    "text": ("completed", [assistant("Hello \U0001f600 from Zürich.")]),
    "reasoning_and_call": (
        "completed",
        [
            reasoning(REASONING_SUMMARIES, encrypted_content=ENCRYPTED),
            tool_call("get_weather", '{"city":"Zürich"}', call_id="call_ijVhE1A5JfpvEbYCLs7MVtDk"),
        ],
    ),
    "parallel_calls": (
        "completed",
        [
            tool_call("get_weather", '{"city":"Bern"}', call_id="call_alpha"),
            tool_call("get_time", '{"zone":"CET"}', call_id="call_beta"),
        ],
    ),
    "custom_tool": ("completed", [tool_call("apply", PATCH, call_id="call_patch", custom=True)]),
    "refusal": ("completed", [assistant([RefusalPart("I can't help with that.")])]),
    "incomplete": ("incomplete", [assistant("Once upon a")]),
    "failed": ("failed", [assistant("Let me see")]),
    "error": ("failed", [assistant("Let")]),
    "web_search": ("completed", [opaque(SEARCH), assistant("A kedge is a light anchor.")]),
    "compaction": ("completed", [opaque(COMPACTION), assistant("Where were we?")]),
    "image": (
        "completed",
        [opaque(read_messages("image")[-1]["response"]["output"][0]), assistant("Here it is.")],
    ),
    "reasoning_text": (
        "completed",
        [reasoning(text="Two and two make four."), assistant("4")],
    ),
    "plain_server": (
        "completed",
        [assistant("Just words"), tool_call("roll", '{"sides":6}', call_id="call_plain")],
    ),
    "llama_cpp": (
        "completed",
        [
            reasoning(text="Two cities, two calls."),
            assistant("Let me look."),
            tool_call("get_weather", '{"city":"Bern"}', call_id="fc_68c1cc"),
            tool_call("get_weather", '{"city":"Basel"}', call_id="fc_68c1dd"),
        ],
    ),
    "all_at_once": (
        "completed",
        [assistant("All at once."), tool_call("roll", "{}", call_id="call_once")],
    ),
}

all_transcripts = for_each("name", TRANSCRIPT_NAMES)
numbered_transcripts = for_each(
    "name", [name for name in TRANSCRIPT_NAMES if name not in ("plain_server", "llama_cpp")]
)


def is_same_outcome(one: Outcome, other: Outcome) -> bool:
    """Return whether two outcomes are equal, ignoring the local ids of blocks."""
    return all(
        getattr(one, member) == getattr(other, member)
        for member in Outcome.__struct_fields__
        if member != "blocks"
    ) and [(b.kind, b.content, b.metadata, b.origin) for b in one.blocks] == [
        (b.kind, b.content, b.metadata, b.origin) for b in other.blocks
    ]


def test_every_transcript_has_an_expected_result() -> None:
    """Every transcript has an expected result, and every expected result a transcript."""
    assert sorted(EXPECTED) == TRANSCRIPT_NAMES


@all_transcripts
def test_transcript_gives_the_expected_blocks(name: str) -> None:
    """Each transcript, fed at once, gives the expected status and blocks."""
    status, blocks = EXPECTED[name]
    result = decode_outcome(read_transcript(name))
    assert result.status == status
    assert list(result.blocks) == blocks


@all_transcripts
def test_blocks_have_response_metadata(name: str) -> None:
    """Each block has its response id, item id, output index and origin."""
    result = decode_outcome(read_transcript(name))
    assert result.response_id.startswith("resp_68")
    for position, block in enumerate(result.blocks):
        assert block.origin == "engine"
        assert block.response_id == result.response_id
        name = block.item_id or getattr(block, "call_id", "")  # calls of llama.cpp have no item id
        assert name.partition("_")[2].startswith(result.response_id[5:9])
        assert block.output_index == position


@all_transcripts
def test_a_stream_without_output_indexes_gives_the_same_events(name: str) -> None:
    """If the server sends no output indexes, the decoder assigns them."""
    messages = [
        {member: value for member, value in message.items() if member != "output_index"}
        for message in read_messages(name)
    ]
    decoded, assigned = decode(read_transcript(name)), decode(encode_sse(messages))
    assert [each for each in assigned if not isinstance(each, OpaqueEvent)] == [
        each for each in decoded if not isinstance(each, OpaqueEvent)
    ]


@all_transcripts
def test_stream_fed_byte_by_byte_gives_the_same_result(name: str) -> None:
    """A stream fed one byte at a time gives the same events and outcome."""
    stream = read_transcript(name)
    chunks = [stream[at : at + 1] for at in range(len(stream))]
    assert decode(*chunks) == decode(stream)
    assert is_same_outcome(decode_outcome(*chunks), decode_outcome(stream))


@given(st.sampled_from(TRANSCRIPT_NAMES), st.data())
def test_stream_in_any_chunks_gives_the_same_events(name: str, data: st.DataObject) -> None:
    """The events do not depend on how the stream is split into chunks."""
    stream = read_transcript(name)
    positions = data.draw(st.lists(st.integers(0, len(stream)), max_size=20))
    edges = [0, *sorted(positions), len(stream)]
    assert decode(*(stream[a:b] for a, b in pairwise(edges))) == decode(stream)


@all_transcripts
@pytest.mark.parametrize("end", [b"\r\n", b"\r"], ids=["CRLF", "CR"])
def test_stream_with_other_line_ends_gives_the_same_events(name: str, end: bytes) -> None:
    """The events do not depend on the line ends of the stream."""
    stream = read_transcript(name)
    assert decode(stream.replace(b"\n", end)) == decode(stream)


@all_transcripts
def test_websocket_messages_give_the_same_events(name: str) -> None:
    """WebSocket messages, as text or as objects, give the same events as a stream."""
    decoder, others = ResponsesDecoder(), ResponsesDecoder()
    lines = read_transcript(name).decode().splitlines()
    data = [line[6:] for line in lines if line.startswith("data: {")]
    events = [event for message in data for event in decoder.feed_message(message)]
    assert events == decode(read_transcript(name))
    objects = [event for each in read_messages(name) for event in others.feed_message(each)]
    assert objects == events


@numbered_transcripts
def test_a_stream_with_duplicate_events_gives_the_same_result(name: str) -> None:
    """Duplicate events are detected by their sequence numbers and ignored."""
    doubled = [event for event in read_messages(name) for _ in range(2)]
    decoder = ResponsesDecoder()
    events = decode(encode_sse(doubled), decoder=decoder)
    assert events == decode(read_transcript(name))
    assert decoder.duplicates >= len(read_messages(name)) - 1


@numbered_transcripts
def test_resumed_stream_with_repeated_events_gives_the_same_result(name: str) -> None:
    """A second connection that repeats the last events gives the same events."""
    events = read_messages(name)
    for at in range(1, len(events)):
        repeated = [*events[:at], *events[max(0, at - 4) :]]
        assert decode(encode_sse(repeated)) == decode(read_transcript(name))


@numbered_transcripts
def test_late_duplicate_gives_the_same_result(name: str) -> None:
    """An event that is repeated much later is ignored."""
    events = read_messages(name)
    rng = random.Random(name)
    for _ in range(20):
        copy = rng.choice(events[:-1])
        at = rng.randrange(copy["sequence_number"] + 1, len(events))
        assert is_same_outcome(replay([*events[:at], copy, *events[at:]]), replay(events))


@all_transcripts
def test_unknown_events_do_not_change_the_outcome(name: str) -> None:
    """Unknown events are passed on as opaque and do not change the outcome."""
    unknown = {"type": "response.tomorrow.delta", "delta": {"deep": [1]}, "item_id": "x_1"}
    interleaved = [each for event in read_messages(name) for each in (unknown, event)]
    assert is_same_outcome(replay(interleaved), replay(read_messages(name)))
    decoded = [
        event
        for event in decode(encode_sse(interleaved))
        if event == OpaqueEvent(unknown["type"], unknown)
    ]
    assert len(decoded) == len(read_messages(name))


@all_transcripts
def test_keepalives_and_comments_do_not_change_the_outcome(name: str) -> None:
    """Messages inserted by proxies are ignored."""
    noise = b": ping\n\nevent: ping\ndata: still here\n\ndata:\n\n"
    stream = noise + read_transcript(name).replace(b"\n\n", b"\n\n" + noise)
    assert is_same_outcome(decode_outcome(stream), decode_outcome(read_transcript(name)))


@all_transcripts
def test_a_stream_cut_at_any_event_is_never_complete(name: str) -> None:
    """A stream without its final event has the status ``cut`` and a prefix of the expected blocks."""
    status, blocks = EXPECTED[name]
    events = read_messages(name)
    for at in range(len(events)):
        result = replay(events[:at])
        assert result.status == "cut"
        assert not result.completed
        assert result.response_id == ("" if at == 0 else replay(events).response_id)
        _assert_prefix(result, blocks)
    assert replay(events).status == status


@pytest.mark.parametrize("name", ["plain_server", "all_at_once"])
def test_a_stream_cut_at_any_byte_is_never_complete(name: str) -> None:
    """The response is completed only when the last byte of the final event has arrived."""
    stream = read_transcript(name)
    ends_at = stream.index(b"\n", stream.rindex(b'{"type":"response.completed"'))
    blocks = EXPECTED[name][1]
    for at in choose_cuts(stream):
        result = decode_outcome(stream[:at])
        assert result.status == ("completed" if at >= ends_at else "cut"), at
        _assert_prefix(result, blocks)


def corrupt_event(event: Message) -> Message:
    """Return the event with its content replaced by a value of the wrong type."""
    return {**event, **dict.fromkeys(event.keys() & {"delta", "item", "text", "arguments"}, 7)}


def without_output(event: Message) -> Message:
    """Return the event without the output listed in its response."""
    response = event.get("response")
    return {**event, "response": {**response, "output": []}} if response else event


@numbered_transcripts
@pytest.mark.parametrize("damage", ["lost", "spoilt"])
@pytest.mark.parametrize("lists", [True, False], ids=["listed", "not listed"])
def test_damaged_event_gives_correct_blocks_or_a_failure(
    name: str, damage: str, lists: bool
) -> None:
    """If any one event is lost or invalid, a completed response still has exactly the expected blocks."""
    status, blocks = EXPECTED[name]
    events = (
        read_messages(name) if lists else [without_output(event) for event in read_messages(name)]
    )
    if name == "all_at_once" and not lists:
        blocks = []
    for at, event in enumerate(events[:-1]):
        replaced = [] if damage == "lost" else [corrupt_event(event)]
        result = replay([*events[:at], *replaced, *events[at + 1 :]])
        assert result.status in (status, "failed"), at
        if result.completed:
            assert list(result.blocks) == blocks, at
    assert list(replay(events).blocks) == blocks


@all_transcripts
@pytest.mark.parametrize("blank", ["missing", "empty"])
def test_late_call_ids_are_used(name: str, blank: str) -> None:
    """The blocks are the same if the added item has no call id and a later event has it."""
    events = json.loads(json.dumps(read_messages(name)))
    for event in events:
        if event["type"] == "response.output_item.added" and "call_id" in event["item"]:
            del event["item"]["call_id"]
            event["item"] |= {"call_id": ""} if blank == "empty" else {}
    result = replay(events)
    expected = EXPECTED[name][1]
    if name == "plain_server":  # no later event has the call id, so the item id is used
        expected = [expected[0], tool_call("roll", '{"sides":6}', call_id="fc_68b3bb")]
    assert list(result.blocks) == expected


def _assert_prefix(result: Outcome, blocks: list[Block]) -> None:
    """Assert that complete blocks equal the expected ones, and partial ones are a prefix."""
    for block in result.blocks:
        position = block.output_index
        assert isinstance(position, int)
        if block.metadata.get("kedge.partial"):
            assert block not in result.whole_blocks
            assert _block_text(blocks[position]).startswith(_block_text(block))
        else:
            assert block == blocks[position]


def _block_text(block: Block) -> str:
    return "".join(str(getattr(block, name, "")) for name in ("text", "refusal", "arguments"))


@for_each("name", [name for name in TRANSCRIPT_NAMES if name != "all_at_once"])
def test_deltas_add_up_to_the_finished_blocks(name: str) -> None:
    """The text and refusal deltas add up to the text and refusal of the blocks."""
    events = decode(read_transcript(name))
    reported = [block for block in EXPECTED[name][1] if isinstance(block, AssistantBlock)]
    text = "".join(event.delta for event in events if isinstance(event, TextDelta))
    refusal = "".join(event.delta for event in events if isinstance(event, RefusalDelta))
    assert text == "".join(block.text for block in reported)
    assert refusal == "".join(block.refusal for block in reported)


def test_start_event_has_response_data() -> None:
    """The first event has the id, model, time and echoed anchor of the response."""
    started = decode(read_transcript("text"))[0]
    assert isinstance(started, ResponseStarted)
    assert started.response_id == "resp_68a1text"
    assert started.model == "gpt-5.6-mini-2026-06-01"
    assert started.created_at == 1788000000
    assert (started.previous_response_id, started.echoed) == ("resp_68a0prev", True)


def test_outcome_has_usage_and_model() -> None:
    """The outcome has the usage, model and time of the response."""
    result = decode_outcome(read_transcript("reasoning_and_call"))
    assert result.usage == Usage(80, 64, 40, 20, 120)
    assert result.model == "gpt-5.6-mini-2026-06-01"
    assert result.created_at == 1788000000


def test_reasoning_is_streamed_by_kind() -> None:
    """Reasoning deltas distinguish summaries from the reasoning itself."""
    summaries = [
        e for e in decode(read_transcript("reasoning_and_call")) if isinstance(e, ReasoningDelta)
    ]
    assert [(e.kind, e.index) for e in summaries] == [("summary", 0)] * 2 + [("summary", 1)] * 2
    texts = [e for e in decode(read_transcript("reasoning_text")) if isinstance(e, ReasoningDelta)]
    assert {e.kind for e in texts} == {"reasoning"}


def test_interleaved_arguments_are_assigned_to_their_calls() -> None:
    """The interleaved argument deltas of two calls are assigned to the right call."""
    events = decode(read_transcript("parallel_calls"))
    arguments = {"call_alpha": "", "call_beta": ""}
    for event in events:
        if isinstance(event, ToolArgumentsDelta):
            arguments[event.call_id] += event.delta
    assert arguments == {"call_alpha": '{"city":"Bern"}', "call_beta": '{"zone":"CET"}'}
    complete = {e.call_id: e.arguments for e in events if isinstance(e, ToolCallCompleted)}
    assert complete == arguments


def test_encrypted_reasoning_is_read_from_the_finished_item() -> None:
    """Encrypted content is read from the finished item, because that of the added item may be incomplete."""
    events = read_messages("reasoning_and_call")
    added = next(e for e in events if e["type"] == "response.output_item.added")
    assert added["item"]["encrypted_content"] not in ("", ENCRYPTED)
    assert decode_outcome(read_transcript("reasoning_and_call")).blocks[0].content[2] == ENCRYPTED
    cut_before_done = replay(events[:8])
    assert cut_before_done.blocks[0].content[2] == ""
