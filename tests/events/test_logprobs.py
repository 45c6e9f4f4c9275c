"""Log probabilities of tokens in the streams of the Responses and Chat Completions APIs."""

from typing import Any

import pytest

from events.streams import assemble
from kedge.events import ChatDecoder, ResponsesDecoder, StreamDecoder, StreamEvent, TextDelta
from kedge.events.assembler import Assembler
from kedge.turns import AssistantBlock

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
