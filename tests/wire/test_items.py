"""The table that decides which item an event belongs to, and the log probabilities of its tokens."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from kedge.events import (
    AnomalyNoted,
    ItemCompleted,
    ResponseCompleted,
    TextDelta,
    ToolArgumentsDelta,
)
from kedge.turns import AssistantBlock, assistant, reasoning, tool_call
from kedge.wire import AnthropicDecoder, ChatDecoder, ItemTable, ResponsesDecoder, StreamDecoder
from kedge.wire.assembler import Assembler
from kedge.wire.items import OutputItem
from wire.streams import Message, assemble, decode, encode_sse, replay, response_event, text_delta

Item = tuple[str, int]
ITEMS = st.lists(st.tuples(st.sampled_from(["a", "b", ""]), st.integers(0, 3)), max_size=6)


def reconcile(known: list[Item], *listed: str) -> list[int]:
    """Return the indexes of the messages with these ids in a finished response."""
    table = ItemTable()
    for item_id, index in known:
        table.finish(OutputItem("message", item_id, index))
    matched = table.reconcile([message("", item_id) for item_id in listed])
    return [item.output_index for item in matched]


def test_id_has_precedence_over_the_position() -> None:
    """A match by the id takes precedence over an earlier one by the position; an empty id matches none."""
    known = [("a", 0), ("b", 1)]
    assert reconcile(known, "x", "a") == [1, 0]
    assert reconcile(known, "b", "x", "y") == [1, 0, 2]
    assert reconcile([("", 1), ("", 0)], "", "") == [0, 1]


@given(ITEMS, st.lists(st.sampled_from(["a", "b", "c", ""]), max_size=6))
def test_no_match_is_used_twice(known: list[Item], listed: list[str]) -> None:
    """Each known item is matched with at most one listed item."""
    claimed = reconcile(known, *listed)
    assert len(claimed) == len(set(claimed)) == len(listed)


def item_event(kind: str, item: Message, **place: int) -> Message:
    return {"type": f"response.output_item.{kind}", **place, "item": item}


def completed(*items: Message) -> Message:
    return response_event("completed", status="completed", output=list(items))


def message(text: str, item_id: str = "x", **more: Any) -> Message:
    content = [{"type": "output_text", "text": text, **more}]
    return {"type": "message", "id": item_id, "role": "assistant", "content": content}


CALL = {"type": "function_call", "call_id": "call_1", "name": "roll", "arguments": "{}"}
CALL_DELTA = {"type": "response.function_call_arguments.delta", "delta": "{}"}
THOUGHT = {"type": "reasoning", "id": "x", "summary": [{"type": "summary_text", "text": "Hm."}]}


@for_each("place", [{}, {"output_index": 0}])
@for_each("lists", [True, False])
def test_one_id_for_items_of_several_types(place: dict[str, int], lists: bool) -> None:
    """A server with one id for all items of a response does not lose any of them."""
    items = [THOUGHT, {**CALL, "id": "x"}, message("Hello")]
    stream = [item_event("added", item, **place) for item in items]
    for delta in (text_delta("Hel", "x"), text_delta("lo", "x")):
        del delta["output_index"]
        stream.append({**delta, **place})
    stream += [item_event("done", item, **place) for item in items]
    outcome = replay([*stream, completed(*(items if lists else []))])
    expected = [reasoning("Hm."), tool_call("roll", "{}", call_id="call_1"), assistant("Hello")]
    assert list(outcome.blocks) == expected
    assert (outcome.status, outcome.anchor_problem) == ("completed", "")
    assert [block.output_index for block in outcome.blocks] == [0, 1, 2]


def test_text_of_a_second_message_with_the_same_id_is_kept() -> None:
    """A delta with the id of a finished message and another index belongs to a new message."""
    done = item_event("done", message("one"), output_index=0)
    events = [done, text_delta("two", "x", output_index=1)]
    decoded = decode(encode_sse(events))
    assert [e.output_index for e in decoded if isinstance(e, ItemCompleted | TextDelta)] == [0, 1]
    assert list(replay([*events, completed()]).blocks) == [assistant("one"), assistant("two")]


def test_arguments_without_ids_are_not_assigned_to_one_of_two_open_calls() -> None:
    """Arguments that could belong to two calls wait, even if the first ones were assigned."""
    stream: list[Message] = []
    for call_id in ("call_1", "call_2"):
        stream += [item_event("added", {**CALL, "call_id": call_id, "arguments": ""}), CALL_DELTA]
    events = decode(encode_sse([*stream, completed()]))
    assert [e.call_id for e in events if isinstance(e, ToolArgumentsDelta)] == ["call_1"]
    unresolved = [e.detail for e in events if isinstance(e, AnomalyNoted)]
    assert unresolved == ["call 'call_2'", "item ''"]


def test_text_without_id_and_index_belongs_to_the_message_without_an_id() -> None:
    """Of two open messages, the one whose id is known is not meant."""
    stream = [item_event("added", message("", item_id)) for item_id in ("", "a")]
    for item_id, text in (("a", "Two"), ("", "One")):
        delta = text_delta(text, item_id)
        del delta["output_index"]
        stream.append(delta)
    assert list(replay([*stream, completed()]).blocks) == [assistant("One"), assistant("Two")]


def test_finished_part_after_its_item_adds_no_message() -> None:
    """A part that ends after its item, under another id, does not repeat the text of the item."""
    part = {"type": "output_text", "text": "Hello"}
    ended = {"type": "response.content_part.done", "item_id": "y", "output_index": 0, "part": part}
    done = item_event("done", message("Hello"), output_index=0)
    text_done = {"type": "response.output_text.done", "item_id": "x", "output_index": 0}
    stream = [text_delta("Hello", "x"), {**text_done, "text": "Hello"}, done, ended, completed()]
    shown = [e.delta for e in decode(encode_sse(stream)) if isinstance(e, TextDelta)]
    assert shown == ["Hello"]
    assert list(replay(stream).blocks) == [assistant("Hello")]


def test_repeated_call_without_index_is_one_call() -> None:
    """Events of a call that arrive twice, without ids and indexes of their own, add nothing."""
    stream = [item_event("added", {**CALL, "arguments": ""}), CALL_DELTA, item_event("done", CALL)]
    outcome = replay([*stream, *stream, completed()])
    assert (outcome.status, len(outcome.blocks)) == ("completed", 1)


@for_each("kind", [{}, [], None, 7])
def test_types_and_statuses_that_are_no_text_do_not_raise(kind: Any) -> None:
    """A part, a delta with half a character and a complete response are stored or rejected."""
    item = {**message("Hello"), "content": [{"type": kind, "text": "Hello"}]}
    events = [text_delta("Hello", "x"), item_event("done", item, output_index=0)]
    assert replay([*events, completed(item)]).status in ("completed", "failed")
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


def stream_logprobs(api: str) -> list[Message]:
    """Return a stream of the tokens, which ends without the finished message."""
    pieces = zip(TOKENS, LOGPROBS, strict=True)
    if api == "responses":
        deltas = [text_delta(token, logprobs=[each]) for token, each in pieces]
        return [*deltas, response_event("completed", status="completed")]
    choices: list[Message] = [
        {"delta": {"content": token}, "logprobs": {"content": [each]}} for token, each in pieces
    ]
    choices.append({"delta": {}, "logprobs": None, "finish_reason": "stop"})
    return [{"id": "c", "choices": [choice]} for choice in choices]


@for_each(("api", "decoder_type"), [("chat", ChatDecoder), ("responses", ResponsesDecoder)])
def test_deltas_and_block_have_the_log_probabilities(
    api: str, decoder_type: type[StreamDecoder]
) -> None:
    """Those of a token without text belong to the next delta; the text of the block has all of them."""
    decoder = decoder_type()
    events = [event for each in stream_logprobs(api) for event in decoder.feed_message(each)]
    events += decoder.close()
    deltas = [event for event in events if isinstance(event, TextDelta)]
    shown = [(event.delta, len(event.logprobs)) for event in deltas]
    assert shown == [("Hi", 1), ("\U0001f600", 2), ("!", 1)]
    assert [each for event in deltas for each in event.logprobs] == REPAIRED
    [block] = assemble(events).blocks
    assert isinstance(block, AssistantBlock)
    assert block.text == "Hi\U0001f600!"
    assert list(block.parts[0].extra["logprobs"]) == REPAIRED


MESSAGE = message("Hi!", "m", logprobs=LOGPROBS)
(PART,) = MESSAGE["content"]
AT = {"item_id": "m", "output_index": 0, "content_index": 0}
ENDS: dict[str, Message] = {
    "text done": {**AT, **PART, "type": "response.output_text.done"},
    "part done": {"type": "response.content_part.done", **AT, "part": PART},
    "item done": item_event("done", MESSAGE, output_index=0),
}


@for_each("end", [*ENDS, "whole"])
def test_text_without_deltas_has_the_log_probabilities(end: str) -> None:
    """They are in the delta of a text that a server did not stream, wherever it sent the text."""
    decoder = ResponsesDecoder()
    assembler = Assembler()
    if end == "whole":
        events = decoder.feed_whole({"id": "r", "status": "completed", "output": [MESSAGE]})
    else:
        events = decoder.feed_message(ENDS[end])
        events += decoder.feed_message(response_event("completed", status="completed"))
    for event in events:
        assembler.feed(event)
    assembler.finish()
    deltas = [e for e in [*events, *assembler.unstreamed_text()] if isinstance(e, TextDelta)]
    assert [event.delta for event in deltas] == ["Hi!"]
    assert list(deltas[0].logprobs) == REPAIRED
