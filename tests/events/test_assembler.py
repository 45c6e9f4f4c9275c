"""Events into blocks, whoever the provider is, and the judgement at the end."""

import logging
from dataclasses import dataclass
from typing import Any

import pytest

from events.streams import assemble, read_messages, replay
from kedge.events import (
    AnomalyNoted,
    Assembler,
    Event,
    ItemCompleted,
    ItemStarted,
    OpaqueEvent,
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
from kedge.turns import RefusalPart, assistant, opaque, reasoning, tool_call

COMPLETED = ResponseCompleted("resp_1", status="completed")


def message_item(text: str, item_id: str = "msg_1", **more: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": item_id, "role": "assistant", "content": content, **more}


# Without a single finished item: what another provider's decoder will send.


def test_a_provider_that_sends_only_deltas_gives_the_same_blocks() -> None:
    """Deltas and an end are enough; no item of the Responses API is needed."""
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
    assert [dict(block.metadata) for block in result.blocks] == [
        {"response_id": "chat_1", "output_index": position} for position in range(3)
    ]


def test_without_places_blocks_keep_the_order_of_arrival() -> None:
    """A provider that names no place means: as it comes."""
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
    assert [block.metadata["output_index"] for block in result.blocks] == [0, 1, 2]


def test_parts_keep_the_order_of_their_index() -> None:
    """Text and refusal parts, summaries and texts."""
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


def test_the_final_text_of_a_part_wins_over_its_deltas(caplog: pytest.LogCaptureFixture) -> None:
    """Deltas that were lost are made good, and late ones change nothing."""
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
    """Some servers leave it out."""
    events = [TextDelta("words", "m", 0), PartCompleted("text", "", "m", 0), COMPLETED]
    assert list(assemble(events).blocks) == [assistant("words")]


def test_halves_of_a_character_meet_in_the_block() -> None:
    """A decoder that does not hold halves back does no harm."""
    events = [TextDelta("\ud83d", "m", 0), TextDelta("\ude00", "m", 0), COMPLETED]
    assert list(assemble(events).blocks) == [assistant("\U0001f600")]


def test_a_renamed_call_is_found_under_both_names() -> None:
    """Words before and after the correction are one call's, even after its item was finished."""
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
    """Arguments or a new name for a call that never began build no block."""
    events = [ToolArgumentsDelta("call_x", "{}"), ToolCallRenamed("call_y", "call_x"), COMPLETED]
    assert assemble(events).blocks == ()


@dataclass(frozen=True, slots=True)
class WeatherEvent(Event):
    """An event of somebody else's."""

    sky: str


def test_events_of_others_are_passed_over() -> None:
    """An engine may feed everything that it tells its watchers."""
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


def test_the_finished_item_wins_over_deltas_and_keeps_what_it_has_besides() -> None:
    """Annotations and members that nobody reads are kept."""
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
    """The first one stays; a different second one is logged without its words."""
    events = [
        ItemCompleted(message_item("one"), 0),
        ItemCompleted(message_item("two secret"), 0),
        COMPLETED,
    ]
    assert list(assemble(events).blocks) == [assistant("one")]
    assert "the streamed version is used" in caplog.text
    assert "secret" not in caplog.text


def test_an_item_under_a_new_id_at_the_same_place_is_the_same_item() -> None:
    """Not every server finishes an item under the id it began it with."""
    events = [
        ItemStarted("message", "msg_a", 0),
        TextDelta("hi", "msg_b", 0),
        ItemCompleted(message_item("hi", "msg_c"), 0),
        ResponseCompleted("resp_1", output=(message_item("hi", "msg_d"),)),
    ]
    assert list(assemble(events).blocks) == [assistant("hi")]


def test_two_items_at_one_place_are_two_items() -> None:
    """A server that gives every item the place 0 loses none."""
    events = [
        ItemStarted("message", "msg_a", 0),
        ItemStarted("message", "msg_b", 0),
        TextDelta("one", "msg_a", 0),
        TextDelta("two", "msg_b", 0),
        ItemCompleted(message_item("one", "msg_a"), 0),
        ItemCompleted(message_item("two", "msg_b"), 0),
        ResponseCompleted(
            "resp_1", output=(message_item("one", "msg_a"), message_item("two", "msg_b"))
        ),
    ]
    assert list(assemble(events).blocks) == [assistant("one"), assistant("two")]


def test_two_messages_under_one_id_are_two_messages() -> None:
    """A server that has one id for everything loses nothing either."""
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
    """In their places."""
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    events = [
        TextDelta("hi", "msg_1", 1),
        ItemCompleted(message_item("hi"), 1),
        ResponseCompleted("resp_1", output=(search, message_item("hi"))),
    ]
    assert list(assemble(events).blocks) == [opaque(search), assistant("hi")]


def test_a_listed_item_vouches_for_deltas() -> None:
    """What the stream began and the list finishes is whole, in the words of the list."""
    events = [
        AnomalyNoted("gap"),
        TextDelta("hel", "msg_1", 0),
        ResponseCompleted("resp_1", output=(message_item("hello"),)),
    ]
    result = assemble(events)
    assert result.completed
    assert list(result.blocks) == [assistant("hello")]


def test_where_list_and_stream_differ_the_finished_item_of_the_stream_wins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And it is logged; a mere difference of ids or status is none."""
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


CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "t", "arguments": "{}"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": []}


@pytest.mark.parametrize(
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
    ids=[
        "another text",
        "a missing item",
        "another order",
        "the same",
        "another id",
        "an item that was not streamed",
        "missing reasoning",
        "no list",
    ],
)
def test_a_response_that_contradicts_its_stream_is_no_anchor(
    streamed: list[dict[str, Any]], listed: list[dict[str, Any]], problem: str
) -> None:
    """The response is complete, but which version the server stored is not known."""
    events: list[Event] = [ItemCompleted(item, index) for index, item in enumerate(streamed)]
    result = assemble([*events, ResponseCompleted("resp_1", output=tuple(listed))])  # type: ignore[list-item]
    assert result.completed
    assert problem in result.anchor_problem
    assert bool(problem) == bool(result.anchor_problem)


@pytest.mark.parametrize("kind", ["contradiction", "replaced_text"])
def test_an_anomaly_of_content_costs_the_anchor_and_not_the_response(kind: Any) -> None:
    """The blocks are complete, and only the server's version of them is in doubt."""
    events = [TextDelta("hi", "msg_1", 0), AnomalyNoted(kind, "why"), COMPLETED]
    result = assemble(events)
    assert result.completed
    assert result.anchor_problem == "why"


def test_a_call_under_a_local_id_is_no_anchor_until_its_own_id_is_known() -> None:
    """The server does not know the call by a fallback id."""
    started = ToolCallStarted("fc_1", "t", "fc_1", 0, fallback="missing")
    finished = ToolCallCompleted("fc_1", "t", "{}", "fc_1", 0)
    assert "call_id" in assemble([started, finished, COMPLETED]).anchor_problem
    renamed = ToolCallRenamed("call_1", "fc_1")
    assert assemble([started, renamed, COMPLETED]).anchor_problem == ""


def test_a_list_without_ids_or_with_items_left_out_adds_nothing_twice() -> None:
    """Items are recognised by id, else by place and type, else by order and type."""
    calls = [
        {"type": "function_call", "id": f"fc_{n}", "call_id": f"call_{n}", "name": "t"}
        for n in range(3)
    ]
    calls = [{**call, "arguments": f"[{n}]"} for n, call in enumerate(calls)]
    streamed = [ItemCompleted(call, n + 1) for n, call in enumerate(calls)]
    thought = ItemCompleted({"type": "reasoning", "id": "rs_1", "summary": []}, 0)
    anonymous = tuple({**call, "id": f"x{n}", "call_id": f"y{n}"} for n, call in enumerate(calls))
    result = assemble([thought, *streamed, ResponseCompleted("resp_1", output=anonymous)])
    assert [block.kind for block in result.blocks] == ["reasoning"] + ["tool_call"] * 3


# Judgement.


@pytest.mark.parametrize(
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
def test_only_one_ending_is_success(ending: list[StreamEvent], status: str) -> None:
    """And whatever was said first about a failure stands."""
    result = assemble([TextDelta("hi", "m", 0), *ending])
    assert result.status == status
    assert result.completed == (status == "completed")
    assert list(result.blocks) == [assistant("hi")]
    assert (result.blocks[0].metadata.get("partial") is True) == (status != "completed")


def test_a_failure_keeps_the_servers_words_out_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its code is logged; its message is for the caller."""
    caplog.set_level(logging.DEBUG)
    result = assemble([StreamFailed("oops", "secret details"), ResponseFailed("resp_1")])
    assert (result.code, result.message) == ("oops", "secret details")
    assert "secret" not in caplog.text
    assert "oops" in caplog.text


def test_a_failure_has_the_message_of_the_response() -> None:
    """The terminal event knows best."""
    result = assemble([StreamFailed("a", "b"), ResponseFailed("resp_1", code="c", message="d")])
    assert (result.code, result.message) == ("c", "d")


@pytest.mark.parametrize(
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
    ids=[
        "malformed",
        "gap",
        "hole",
        "late",
        "call",
        "unfinished",
        "open call",
        "infinite",
        "typeless",
    ],
)
def test_a_stream_found_wanting_has_failed(stream: list[StreamEvent]) -> None:
    """The server's word that it is complete is not enough."""
    result = assemble(stream)
    assert (result.status, result.code) == ("failed", "damaged_stream")
    assert result.message


def test_an_anomaly_is_forgiven_where_finished_items_vouch() -> None:
    """A late or lost delta of an item that came whole has no weight."""
    events = [
        AnomalyNoted("gap"),
        AnomalyNoted("late"),
        TextDelta("h", "msg_1", 0),
        ItemCompleted(message_item("hi"), 0),
        COMPLETED,
    ]
    assert assemble(events).completed


def test_an_item_begun_without_a_word_is_no_block() -> None:
    """An empty message says nothing, even if its server never ends it."""
    result = assemble([ItemStarted("message", "m", 0), ItemStarted("reasoning", "r", 1), COMPLETED])
    assert result.completed
    assert result.blocks == ()


def test_a_response_without_an_id_has_none() -> None:
    """An empty string, and blocks without a tag."""
    result = assemble([TextDelta("hi", "m", 0), ResponseCompleted()])
    assert result.response_id == ""
    assert "response_id" not in result.blocks[0].metadata


def test_the_last_word_about_a_response_counts() -> None:
    """What the end does not say is taken from the start."""
    start = ResponseStarted("resp_1", "m1", 5.0, "resp_0", echoed=True)
    result = assemble([start, ResponseCompleted("resp_2", "m2", 6.0, None, echoed=True)])
    assert (result.response_id, result.model, result.created_at) == ("resp_2", "m2", 6.0)
    assert (result.previous_response_id, result.echoed) == (None, True)
    result = assemble([start, ResponseCompleted()])
    assert (result.response_id, result.model, result.created_at) == ("resp_1", "m1", 5.0)
    assert (result.previous_response_id, result.echoed) == ("resp_0", True)


def test_blocks_can_be_looked_at_while_they_grow() -> None:
    """Ids stay the same from the first look to the outcome."""
    assembler = Assembler()
    assembler.feed(ItemCompleted(message_item("one"), 0))
    assembler.feed(TextDelta("tw", "msg_2", 1))
    assert list(assembler.blocks()) == [assistant("one"), assistant("tw")]
    assert list(assembler.blocks(partial=False)) == [assistant("one")]
    early = [block.id for block in assembler.blocks()]
    assembler.feed(TextDelta("o", "msg_2", 1))
    assembler.feed(COMPLETED)
    outcome = assembler.finish()
    assert [block.id for block in outcome.blocks] == early
    assert list(outcome.blocks) == [assistant("one"), assistant("two")]


def test_the_origin_of_blocks_can_be_named() -> None:
    """An engine is the usual one."""
    assembler = Assembler(origin="other")
    assembler.feed(TextDelta("hi"))
    assert assembler.blocks()[0].origin == "other"


def test_complete_blocks_leave_out_cut_content() -> None:
    """Of a stream that was cut, only finished items remain."""
    events = read_messages("reasoning_and_call")
    result = replay(events[:-4])
    assert [block.kind for block in result.blocks] == ["reasoning", "tool_call"]
    assert [block.kind for block in result.whole_blocks] == ["reasoning"]
