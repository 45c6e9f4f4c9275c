"""Recorded-shape streams: the same blocks however they arrive, and never half a response for a whole.

The transcripts have the shape of real streams: text with a torn emoji, reasoning and a call, parallel
calls that interleave, a custom tool, a refusal, an answer cut short, a failure, an error, a web search,
a compaction, an image, an open model's reasoning, a server that sends nothing but deltas, and one that
says everything at the end.
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
    decode,
    decode_outcome,
    encode_sse,
    read_messages,
    read_transcript,
    replay,
)
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

all_transcripts = pytest.mark.parametrize("name", TRANSCRIPT_NAMES)
numbered_transcripts = pytest.mark.parametrize(
    "name", [name for name in TRANSCRIPT_NAMES if name not in ("plain_server", "llama_cpp")]
)


def is_same_outcome(one: Outcome, other: Outcome) -> bool:
    """Whether two outcomes say the same; ids of blocks are local."""
    return all(
        getattr(one, member) == getattr(other, member)
        for member in Outcome.__slots__
        if member != "blocks"
    ) and [(b.kind, b.content, b.metadata, b.origin) for b in one.blocks] == [
        (b.kind, b.content, b.metadata, b.origin) for b in other.blocks
    ]


def test_every_transcript_is_expected_and_every_expectation_has_its_transcript() -> None:
    """Nothing is recorded in vain."""
    assert sorted(EXPECTED) == TRANSCRIPT_NAMES


@all_transcripts
def test_a_stream_gives_its_blocks(name: str) -> None:
    """Fed whole, each stream ends as it should and holds what it should."""
    status, blocks = EXPECTED[name]
    result = decode_outcome(read_transcript(name))
    assert result.status == status
    assert list(result.blocks) == blocks


@all_transcripts
def test_blocks_know_where_they_come_from(name: str) -> None:
    """Response id, item id, place and origin are noted on each block."""
    result = decode_outcome(read_transcript(name))
    assert result.response_id.startswith("resp_68")
    for position, block in enumerate(result.blocks):
        assert block.origin == "engine"
        assert block.response_id == result.response_id
        name = block.item_id or getattr(block, "call_id", "")  # llama.cpp's calls have no item id
        assert name.partition("_")[2].startswith(result.response_id[5:9])
        assert block.metadata["output_index"] == position


@all_transcripts
def test_a_stream_without_output_indexes_gives_the_same_events(name: str) -> None:
    """Indexes are assigned where the server sends none, so that consumers can rely on them."""
    messages = [
        {member: value for member, value in message.items() if member != "output_index"}
        for message in read_messages(name)
    ]
    given, assigned = decode(read_transcript(name)), decode(encode_sse(messages))
    assert [each for each in assigned if not isinstance(each, OpaqueEvent)] == [
        each for each in given if not isinstance(each, OpaqueEvent)
    ]


@all_transcripts
def test_a_stream_fed_byte_by_byte_gives_the_same(name: str) -> None:
    """One byte at a time: the same events, the same outcome."""
    stream = read_transcript(name)
    pieces = [stream[at : at + 1] for at in range(len(stream))]
    assert decode(*pieces) == decode(stream)
    assert is_same_outcome(decode_outcome(*pieces), decode_outcome(stream))


@given(st.sampled_from(TRANSCRIPT_NAMES), st.data())
def test_a_stream_in_any_chunks_gives_the_same(name: str, data: st.DataObject) -> None:
    """Wherever a network cuts the stream, the events are the same."""
    stream = read_transcript(name)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=20))
    edges = [0, *sorted(cuts), len(stream)]
    assert decode(*(stream[a:b] for a, b in pairwise(edges))) == decode(stream)


@all_transcripts
@pytest.mark.parametrize("end", [b"\r\n", b"\r"], ids=["CRLF", "CR"])
def test_a_stream_with_other_line_ends_gives_the_same(name: str, end: bytes) -> None:
    """Line ends are no part of the content."""
    stream = read_transcript(name)
    assert decode(stream.replace(b"\n", end)) == decode(stream)


@all_transcripts
def test_a_websocket_gives_the_same_as_a_stream(name: str) -> None:
    """The same events, as texts, as bytes or as objects."""
    decoder, others = ResponsesDecoder(), ResponsesDecoder()
    lines = read_transcript(name).decode().splitlines()
    data = [line[6:] for line in lines if line.startswith("data: {")]
    events = [event for message in data for event in decoder.feed_message(message)]
    assert events == decode(read_transcript(name))
    objects = [event for each in read_messages(name) for event in others.feed_message(each)]
    assert objects == events


@numbered_transcripts
def test_a_stream_with_duplicate_events_gives_the_same_result(name: str) -> None:
    """Numbers tell that an event was seen before."""
    doubled = [event for event in read_messages(name) for _ in range(2)]
    decoder = ResponsesDecoder()
    events = decode(encode_sse(doubled), decoder=decoder)
    assert events == decode(read_transcript(name))
    assert decoder.duplicates >= len(read_messages(name)) - 1


@numbered_transcripts
def test_a_stream_resumed_too_early_gives_the_same(name: str) -> None:
    """A second connection that repeats the last events before it goes on does no harm."""
    events = read_messages(name)
    for at in range(1, len(events)):
        again = [*events[:at], *events[max(0, at - 4) :]]
        assert decode(encode_sse(again)) == decode(read_transcript(name))


@numbered_transcripts
def test_a_duplicate_anywhere_later_gives_the_same(name: str) -> None:
    """An event that comes again much later is not taken for news."""
    events = read_messages(name)
    rng = random.Random(name)
    for _ in range(20):
        copy = rng.choice(events[:-1])
        at = rng.randrange(copy["sequence_number"] + 1, len(events))
        assert is_same_outcome(replay([*events[:at], copy, *events[at:]]), replay(events))


@all_transcripts
def test_unknown_events_in_between_change_nothing(name: str) -> None:
    """A type of tomorrow is carried along as it is and breaks nothing."""
    news = {"type": "response.tomorrow.delta", "delta": {"deep": [1]}, "item_id": "x_1"}
    woven = [each for event in read_messages(name) for each in (news, event)]
    assert is_same_outcome(replay(woven), replay(read_messages(name)))
    passed_on = [
        event for event in decode(encode_sse(woven)) if event == OpaqueEvent(news["type"], news)
    ]
    assert len(passed_on) == len(read_messages(name))


@all_transcripts
def test_keepalives_comments_and_foreign_messages_change_nothing(name: str) -> None:
    """What proxies put in between is passed over."""
    noise = b": ping\n\nevent: ping\ndata: still here\n\ndata:\n\n"
    stream = noise + read_transcript(name).replace(b"\n\n", b"\n\n" + noise)
    assert is_same_outcome(decode_outcome(stream), decode_outcome(read_transcript(name)))


@all_transcripts
def test_a_stream_cut_at_any_event_is_never_complete(name: str) -> None:
    """Before the terminal event there is no success, and the blocks so far are a beginning."""
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
    """Only when the last byte of the terminal event is there has the response ended."""
    stream = read_transcript(name)
    ends_at = stream.index(b"\n", stream.rindex(b'{"type":"response.completed"'))
    blocks = EXPECTED[name][1]
    for at in range(len(stream) + 1):
        result = decode_outcome(stream[:at])
        assert result.status == ("completed" if at >= ends_at else "cut"), at
        _assert_prefix(result, blocks)


def corrupt_event(event: Message) -> Message:
    """The event with its content in a shape that nobody can read."""
    return {**event, **dict.fromkeys(event.keys() & {"delta", "item", "text", "arguments"}, 7)}


def without_output(event: Message) -> Message:
    """The event of a server that does not list its output at the end."""
    response = event.get("response")
    return {**event, "response": {**response, "output": []}} if response else event


@numbered_transcripts
@pytest.mark.parametrize("damage", ["lost", "spoilt"])
@pytest.mark.parametrize("lists", [True, False], ids=["listed", "not listed"])
def test_with_any_one_event_damaged_a_response_is_right_or_not_success(
    name: str, damage: str, lists: bool
) -> None:
    """Completed means: exactly these blocks, whatever happened on the way."""
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
def test_call_ids_that_come_only_with_the_end_are_found(name: str, blank: str) -> None:
    """Without one when the item is added, the blocks are the same."""
    events = json.loads(json.dumps(read_messages(name)))
    for event in events:
        if event["type"] == "response.output_item.added" and "call_id" in event["item"]:
            del event["item"]["call_id"]
            event["item"] |= {"call_id": ""} if blank == "empty" else {}
    result = replay(events)
    expected = EXPECTED[name][1]
    if name == "plain_server":  # which never says it again: the item's id has to do
        expected = [expected[0], tool_call("roll", '{"sides":6}', call_id="fc_68b3bb")]
    assert list(result.blocks) == expected


def _assert_prefix(result: Outcome, blocks: list[Block]) -> None:
    """Whole blocks are the very blocks; partial ones say only what the model has said."""
    for block in result.blocks:
        position = block.metadata["output_index"]
        assert isinstance(position, int)
        if block.metadata.get("partial"):
            assert block not in result.whole_blocks
            assert _block_text(blocks[position]).startswith(_block_text(block))
        else:
            assert block == blocks[position]


def _block_text(block: Block) -> str:
    return "".join(str(getattr(block, name, "")) for name in ("text", "refusal", "arguments"))


@pytest.mark.parametrize("name", [name for name in TRANSCRIPT_NAMES if name != "all_at_once"])
def test_deltas_add_up_to_the_finished_blocks(name: str) -> None:
    """Whoever shows only deltas shows what the blocks hold."""
    events = decode(read_transcript(name))
    reported = [block for block in EXPECTED[name][1] if isinstance(block, AssistantBlock)]
    text = "".join(event.delta for event in events if isinstance(event, TextDelta))
    refusal = "".join(event.delta for event in events if isinstance(event, RefusalDelta))
    assert text == "".join(block.text for block in reported)
    assert refusal == "".join(block.refusal for block in reported)


def test_the_start_has_the_facts_for_an_engine() -> None:
    """Id, model, time and the echo of the anchor come with the first event."""
    started = decode(read_transcript("text"))[0]
    assert isinstance(started, ResponseStarted)
    assert started.response_id == "resp_68a1text"
    assert started.model == "gpt-5.6-mini-2026-06-01"
    assert started.created_at == 1788000000
    assert (started.previous_response_id, started.echoed) == ("resp_68a0prev", True)


def test_the_end_has_tokens_and_model() -> None:
    """Usage is read member by member."""
    result = decode_outcome(read_transcript("reasoning_and_call"))
    assert result.usage == Usage(80, 64, 40, 20, 120)
    assert result.model == "gpt-5.6-mini-2026-06-01"
    assert result.created_at == 1788000000


def test_reasoning_is_streamed_by_kind() -> None:
    """Summaries and the reasoning itself are different things."""
    summaries = [
        e for e in decode(read_transcript("reasoning_and_call")) if isinstance(e, ReasoningDelta)
    ]
    assert [(e.kind, e.index) for e in summaries] == [("summary", 0)] * 2 + [("summary", 1)] * 2
    texts = [e for e in decode(read_transcript("reasoning_text")) if isinstance(e, ReasoningDelta)]
    assert {e.kind for e in texts} == {"reasoning"}


def test_interleaved_arguments_go_to_their_own_calls() -> None:
    """Two calls written at once keep their words apart."""
    events = decode(read_transcript("parallel_calls"))
    words = {"call_alpha": "", "call_beta": ""}
    for event in events:
        if isinstance(event, ToolArgumentsDelta):
            words[event.call_id] += event.delta
    assert words == {"call_alpha": '{"city":"Bern"}', "call_beta": '{"zone":"CET"}'}
    complete = {e.call_id: e.arguments for e in events if isinstance(e, ToolCallCompleted)}
    assert complete == words


def test_encrypted_reasoning_is_read_from_the_finished_item() -> None:
    """What the item held when it was begun may be incomplete."""
    events = read_messages("reasoning_and_call")
    added = next(e for e in events if e["type"] == "response.output_item.added")
    assert added["item"]["encrypted_content"] not in ("", ENCRYPTED)
    assert decode_outcome(read_transcript("reasoning_and_call")).blocks[0].content[2] == ENCRYPTED
    cut_before_done = replay(events[:8])
    assert cut_before_done.blocks[0].content[2] == ""
