"""The table that decides which item an event belongs to, and the log probabilities of its tokens."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.streams import Message, assemble, decode, encode_sse, replay
from kedge.events import (
    AnomalyNoted,
    AnthropicDecoder,
    ChatDecoder,
    ItemCompleted,
    ItemTable,
    ResponseCompleted,
    ResponsesDecoder,
    StreamDecoder,
    StreamEvent,
    TextDelta,
    ToolArgumentsDelta,
)
from kedge.events.assembler import Assembler
from kedge.events.items import OutputItem
from kedge.turns import AssistantBlock, assistant, reasoning, tool_call

Item = tuple[str, int]
ITEMS = st.lists(st.tuples(st.sampled_from(["a", "b", ""]), st.integers(0, 3)), max_size=6)


def reconcile(known: list[Item], *listed: str) -> list[int]:
    """Return the indexes of the messages with these ids in a finished response."""
    table = ItemTable()
    for item_id, index in known:
        table.finish(OutputItem("message", item_id, index))
    matched = table.reconcile([message("", item_id) for item_id in listed])
    return [item.output_index for item, _ in matched]


def test_id_has_precedence_over_the_position() -> None:
    """A match by the id takes precedence over an earlier match by the position."""
    known = [("a", 0), ("b", 1)]
    assert reconcile(known, "x", "a") == [1, 0]
    assert reconcile(known, "b", "x", "y") == [1, 0, 2]


def test_empty_id_does_not_match() -> None:
    """Two items without an id are matched by their position only."""
    assert reconcile([("", 1), ("", 0)], "", "") == [0, 1]


@given(ITEMS, st.lists(st.sampled_from(["a", "b", "c", ""]), max_size=6))
def test_no_match_is_used_twice(known: list[Item], listed: list[str]) -> None:
    """Each known item is matched with at most one listed item."""
    claimed = reconcile(known, *listed)
    assert len(claimed) == len(set(claimed)) == len(listed)


def item_event(kind: str, item: Message, **place: int) -> Message:
    return {"type": f"response.output_item.{kind}", **place, "item": item}


def completed(*items: Message) -> Message:
    response = {"id": "resp_1", "status": "completed", "output": list(items)}
    return {"type": "response.completed", "response": response}


def message(text: str, item_id: str = "x") -> Message:
    content = [{"type": "output_text", "text": text}]
    return {"type": "message", "id": item_id, "role": "assistant", "content": content}


def text_delta(delta: str, **place: int) -> Message:
    kind = "response.output_text.delta"
    return {"type": kind, "item_id": "x", "content_index": 0, **place, "delta": delta}


CALL = {"type": "function_call", "call_id": "call_1", "name": "roll", "arguments": "{}"}
THOUGHT = {"type": "reasoning", "id": "x", "summary": [{"type": "summary_text", "text": "Hm."}]}


@pytest.mark.parametrize("place", [{}, {"output_index": 0}], ids=["no index", "one index"])
@pytest.mark.parametrize("lists", [True, False], ids=["listed", "not listed"])
def test_one_id_for_items_of_several_types(place: dict[str, int], lists: bool) -> None:
    """A server with one id for all items of a response does not lose any of them."""
    items = [THOUGHT, {**CALL, "id": "x"}, message("Hello")]
    stream = [item_event("added", item, **place) for item in items]
    stream += [text_delta("Hel", **place), text_delta("lo", **place)]
    stream += [item_event("done", item, **place) for item in items]
    end = completed(*(items if lists else []))
    outcome = replay([*stream, end])
    expected = [reasoning("Hm."), tool_call("roll", "{}", call_id="call_1"), assistant("Hello")]
    assert list(outcome.blocks) == expected
    assert (outcome.status, outcome.anchor_problem) == ("completed", "")
    assert [block.output_index for block in outcome.blocks] == [0, 1, 2]


def test_text_of_a_second_message_with_the_same_id_is_kept() -> None:
    """A delta with the id of a finished message and another index belongs to a new message."""
    events = [item_event("done", message("one"), output_index=0), text_delta("two", output_index=1)]
    decoded = decode(encode_sse(events))
    assert [e.output_index for e in decoded if isinstance(e, ItemCompleted | TextDelta)] == [0, 1]
    assert list(replay([*events, completed()]).blocks) == [assistant("one"), assistant("two")]


def test_arguments_without_ids_are_not_assigned_to_one_of_two_open_calls() -> None:
    """Arguments that could belong to two calls wait, even if the first ones were assigned."""
    arguments = {"type": "response.function_call_arguments.delta", "delta": "{}"}
    first, second = CALL, {**CALL, "call_id": "call_2"}
    events = decode(
        encode_sse(
            [
                item_event("added", {**first, "arguments": ""}),
                arguments,
                item_event("added", {**second, "arguments": ""}),
                arguments,
                completed(),
            ]
        )
    )
    assert [e.call_id for e in events if isinstance(e, ToolArgumentsDelta)] == ["call_1"]
    unresolved = [e.detail for e in events if isinstance(e, AnomalyNoted)]
    assert unresolved == ["call 'call_2'", "item ''"]


def test_finished_part_after_its_item_adds_no_message() -> None:
    """A part that ends after its item, under another id, does not repeat the text of the item."""
    part = {"type": "output_text", "text": "Hello"}
    ended = {"type": "response.content_part.done", "item_id": "y", "output_index": 0, "part": part}
    done = item_event("done", message("Hello"), output_index=0)
    text_done = {
        "type": "response.output_text.done",
        "item_id": "x",
        "output_index": 0,
        "text": "Hello",
    }
    stream = [text_delta("Hello", output_index=0), text_done, done, ended, completed()]
    shown = [e.delta for e in decode(encode_sse(stream)) if isinstance(e, TextDelta)]
    assert shown == ["Hello"]
    assert list(replay(stream).blocks) == [assistant("Hello")]


def test_repeated_call_without_index_is_one_call() -> None:
    """Events of a call that arrive twice, without ids and indexes of their own, add nothing."""
    arguments = {"type": "response.function_call_arguments.delta", "delta": "{}"}
    stream = [item_event("added", {**CALL, "arguments": ""}), arguments, item_event("done", CALL)]
    outcome = replay([*stream, *stream, completed()])
    assert (outcome.status, len(outcome.blocks)) == ("completed", 1)


@pytest.mark.parametrize("kind", [{}, [], None, 7])
def test_part_with_a_type_that_is_no_text_does_not_raise(kind: Any) -> None:
    """A part whose type is an object or an array is content that is stored or rejected, never an exception."""
    item = {**message("Hello"), "content": [{"type": kind, "text": "Hello"}]}
    events = [text_delta("Hello", output_index=0), item_event("done", item, output_index=0)]
    assert replay([*events, completed(item)]).status in ("completed", "failed")


@pytest.mark.parametrize("kind", [{}, [], None, 7])
def test_types_and_statuses_that_are_no_text_do_not_raise(kind: Any) -> None:
    """A delta with half a character and a complete response are read, whatever is in the place of a name."""
    delta = {"type": kind, "text": "\ud83d"}
    event = {"type": "content_block_delta", "index": 0, "delta": delta}
    assert [type(e) for e in AnthropicDecoder().feed(encode_sse([event]))] == [AnomalyNoted]
    whole = ResponsesDecoder().feed_whole({"id": "resp_1", "status": kind, "output": []})
    assert isinstance(whole[-1], ResponseCompleted)


TOKENS = ["Hi", "\ud83d", "\ude00", "!"]
LOGPROBS: list[dict[str, Any]] = [
    {"token": token, "logprob": -0.5, "bytes": None, "top_logprobs": []} for token in TOKENS
]
REPAIRED = [{**each, "token": each["token"].replace("\ud83d", "\ufffd")} for each in LOGPROBS]
REPAIRED[2]["token"] = "\ufffd"


def decode_chat() -> tuple[StreamDecoder, list[StreamEvent]]:
    """Decode a stream of the Chat Completions API."""
    decoder = ChatDecoder()
    chunks = [
        {"id": "c", "choices": [{"delta": {"content": token}, "logprobs": {"content": [each]}}]}
        for token, each in zip(TOKENS, LOGPROBS, strict=True)
    ]
    end = {"id": "c", "choices": [{"delta": {}, "logprobs": None, "finish_reason": "stop"}]}
    return decoder, [event for chunk in [*chunks, end] for event in decoder.feed_message(chunk)]


def decode_responses() -> tuple[StreamDecoder, list[StreamEvent]]:
    """Decode a stream of the Responses API, which ends without the finished message."""
    decoder = ResponsesDecoder()
    deltas = [
        {
            "type": "response.output_text.delta",
            "item_id": "m",
            "output_index": 0,
            "delta": token,
            "logprobs": [each],
        }
        for token, each in zip(TOKENS, LOGPROBS, strict=True)
    ]
    end = {"type": "response.completed", "response": {"id": "r", "status": "completed"}}
    return decoder, [event for each in [*deltas, end] for event in decoder.feed_message(each)]


@pytest.mark.parametrize("decode", [decode_chat, decode_responses])
def test_deltas_and_block_have_the_log_probabilities(decode: Any) -> None:
    """Those of a token without text belong to the next delta; the text of the block has all of them."""
    decoder, events = decode()
    events += decoder.close()
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert [(event.delta, len(event.logprobs)) for event in deltas] == [
        ("Hi", 1),
        ("\U0001f600", 2),
        ("!", 1),
    ]
    assert [each for event in deltas for each in event.logprobs] == REPAIRED
    [block] = assemble(events).blocks
    assert isinstance(block, AssistantBlock)
    assert block.text == "Hi\U0001f600!"
    assert list(block.parts[0].extra["logprobs"]) == REPAIRED


@pytest.mark.parametrize("logprobs", [5, {"content": 5}, {"content": [5]}, {"content": None}, []])
def test_other_forms_are_ignored(logprobs: Any) -> None:
    """A value that is not a list of objects does not damage a stream."""
    choice = {"delta": {"content": "Hi"}, "logprobs": logprobs, "finish_reason": "stop"}
    decoder = ChatDecoder()
    events = [*decoder.feed_message({"id": "c", "choices": [choice]}), *decoder.close()]
    assert [event.logprobs for event in events if isinstance(event, TextDelta)] == [()]
    assert assemble(events).completed


PART = {"type": "output_text", "text": "Hi!", "logprobs": LOGPROBS}
AT = {"item_id": "m", "output_index": 0, "content_index": 0}
ENDS: dict[str, dict[str, Any]] = {
    "text done": {**AT, **PART, "type": "response.output_text.done"},
    "part done": {"type": "response.content_part.done", **AT, "part": PART},
    "item done": {
        "type": "response.output_item.done",
        "output_index": 0,
        "item": {"type": "message", "id": "m", "role": "assistant", "content": [PART]},
    },
}


@pytest.mark.parametrize("end", [*ENDS, "whole"])
def test_text_without_deltas_has_the_log_probabilities(end: str) -> None:
    """They are in the delta of a text that a server did not stream, wherever it sent the text."""
    decoder, assembler = ResponsesDecoder(), Assembler()
    finished = {"id": "r", "status": "completed"}
    if end == "whole":
        message = {"type": "message", "id": "m", "role": "assistant", "content": [PART]}
        events = decoder.feed_whole({**finished, "output": [message]})
    else:
        completed = {"type": "response.completed", "response": finished}
        events = [*decoder.feed_message(ENDS[end]), *decoder.feed_message(completed)]
    for event in events:
        assembler.feed(event)
    assembler.finish()
    deltas = [e for e in [*events, *assembler.unstreamed_text()] if isinstance(e, TextDelta)]
    assert [event.delta for event in deltas] == ["Hi!"]
    assert list(deltas[0].logprobs) == REPAIRED
