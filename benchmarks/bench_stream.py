"""Streams: CPU of decoding and assembling a burst, against the openai SDK's typed stream.

Both read the same bytes in the same chunks from memory, so that no socket blurs the picture: the SDK
through its own ``Stream`` over an ``httpx2.Response``, Kedge through its decoder and assembler. The SDK
only makes typed events; Kedge makes events *and* blocks.
"""

import json
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.table import Row, compare_cpu
from kedge.events import Outcome
from kedge.wire import Assembler, ResponsesDecoder

BASELINE = "the openai SDK's typed stream"
BURST, LONG = 2_000, 20_000
CHUNK = 16 * 1024

Message = dict[str, Any]


def run() -> list[Row]:
    rows: list[Row] = []
    for kind, make in (("text", make_text_events), ("arguments", make_argument_events)):
        burst, long = make_chunks(make(BURST)), make_chunks(make(LONG))
        events = len(make(BURST))
        sdk, ours, ours_long = compare_cpu(
            partial(read_with_sdk, burst),
            partial(read_with_kedge, burst),
            partial(read_with_kedge, long),
        )
        detail = f"{ours / events * 1e6:.1f} µs an event; SDK {sdk / events * 1e6:.1f}"
        rows.append(Row(f"{BURST} {kind} deltas, against the SDK", ours / sdk, 0.06, detail=detail))
        growth = (ours_long / LONG) / (ours / BURST)
        rows.append(
            Row(f"{LONG} {kind} deltas, per event", growth, 1.1, baseline=f"{BURST} deltas")
        )
    short, line = (split_small(make_line(size)) for size in (4_000_000, 40_000_000))
    of_short, of_line = compare_cpu(partial(read_line, short), partial(read_line, line))
    rows.append(
        Row(
            "a line of 40 MB in chunks of 1 KB, per byte",
            of_line / of_short / 10,
            1.5,
            detail="quadratic: 10",
            baseline="a line of 4 MB",
        )
    )
    return rows


def read_with_kedge(stream: list[bytes]) -> Outcome:
    decoder, assembler = ResponsesDecoder(), Assembler()
    for chunk in stream:
        for event in decoder.feed(chunk):
            assembler.feed(event)
    for event in decoder.close():
        assembler.feed(event)
    outcome = assembler.finish()
    assert outcome.completed, outcome
    return outcome


def read_with_sdk(stream: list[bytes]) -> int:
    os.environ.setdefault("OPENAI_API_KEY", "unused")
    import httpx2
    from openai import OpenAI, Stream
    from openai.types.responses import ResponseStreamEvent

    client = _CLIENTS.setdefault("openai", OpenAI())
    request = httpx2.Request("POST", "http://memory/v1/responses")
    response = httpx2.Response(200, request=request, content=iter(stream))
    events: Stream[ResponseStreamEvent] = Stream(
        cast_to=ResponseStreamEvent,  # type: ignore[arg-type]
        response=response,
        client=client,
    )
    last, count = None, 0
    for event in events:
        last, count = event, count + 1
    assert last is not None
    assert last.type == "response.completed"
    return count


_CLIENTS: dict[str, Any] = {}


def read_line(stream: list[bytes]) -> None:
    decoder = ResponsesDecoder()
    assert sum(len(decoder.feed(chunk)) for chunk in stream) == 1


def make_line(size: int) -> bytes:
    """One event whose line has about this many bytes, such as an image."""
    data = {"type": "response.image_generation_call.partial_image", "partial": "A" * size}
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def split_small(stream: bytes) -> list[bytes]:
    return [stream[at : at + 1024] for at in range(0, len(stream), 1024)]


def make_chunks(events: list[Message]) -> list[bytes]:
    """The events as the bytes of a stream, in the chunks of a socket."""
    stream = b"".join(
        f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events
    )
    return [stream[at : at + CHUNK] for at in range(0, len(stream), CHUNK)]


def make_text_events(count: int) -> list[Message]:
    words = [f" word{n}" for n in range(count)]
    part = {"type": "output_text", "text": "".join(words), "annotations": [], "logprobs": []}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed"}
    position = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    deltas = [
        {"type": "response.output_text.delta", **position, "delta": word, "logprobs": []}
        for word in words
    ]
    done = {"type": "response.output_text.done", **position, "text": part["text"], "logprobs": []}
    started, finished = {**item, "content": []}, {**item, "content": [part]}
    return list(_number_events([*deltas, done], started, finished))


def make_argument_events(count: int) -> list[Message]:
    chunks = ['{"list":[0', *(f",{n}" for n in range(count - 2)), "]}"]
    item = {"id": "fc_1", "type": "function_call", "call_id": "call_1", "name": "sum"}
    position = {"item_id": "fc_1", "output_index": 0}
    kind = "response.function_call_arguments"
    deltas = [{"type": f"{kind}.delta", **position, "delta": word} for word in chunks]
    arguments = "".join(chunks)
    done = {"type": f"{kind}.done", **position, "name": "sum", "arguments": arguments}
    started, finished = {**item, "arguments": ""}, {**item, "arguments": arguments}
    return list(_number_events([*deltas, done], started, finished))


def _number_events(
    middle: list[Message], added_item: Message, done_item: Message
) -> Iterator[Message]:
    response = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1788000000,
        "model": "m",
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "status": "in_progress",
    }
    done = {**response, "status": "completed", "output": [done_item]}
    events: list[Message] = [
        {"type": "response.created", "response": response},
        {"type": "response.output_item.added", "output_index": 0, "item": added_item},
        *middle,
        {"type": "response.output_item.done", "output_index": 0, "item": done_item},
        {"type": "response.completed", "response": done},
    ]
    for number, event in enumerate(events):
        yield {**event, "sequence_number": number}
