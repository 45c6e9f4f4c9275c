"""Test a lane of a WebSocket connection: the order of its messages, its latest response, its limit."""

import asyncio
from typing import Any

import pytest
from anyio.lowlevel import checkpoint

from for_each import for_each
from kedge.engines.websocket.connection import Lane, LaneFailed, SocketMessage


def make_lane() -> Lane:
    """Return a lane whose connection is not used."""
    unused: Any = None
    return Lane(unused, "a")


def make_message(kind: str, data: bytes = b"x", **more: Any) -> SocketMessage:
    """Return a message of a server."""
    return SocketMessage(data, {"type": kind, **more})


async def test_messages_are_read_before_the_failure() -> None:
    """Messages received before the connection broke are still read, in order."""
    lane = make_lane()
    lane.begin("")
    lane.receive(make_message("response.created", response={"id": "resp_1"}))
    lane.receive(make_message("response.in_progress"))
    lane.fail("broken")
    assert [(await lane.next_message()).kind for _ in range(2)] == [
        "response.created",
        "response.in_progress",
    ]
    with pytest.raises(LaneFailed, match="broken"):
        await lane.next_message()


async def test_response_with_a_repeated_id_is_read() -> None:
    """A new response with a repeated id is read, and a late event of the previous response is not."""
    lane = make_lane()
    created = make_message("response.created", response={"id": "resp_1"})
    completed = make_message("response.completed", response={"id": "resp_1"})
    for _ in range(2):
        lane.begin("")
        for message in (
            completed,
            created,
            completed,
        ):  # the first message is late in the second round
            lane.receive(message)
    assert [(await lane.next_message()).kind for _ in range(2)] == [created.kind, completed.kind]


@for_each(
    ("kind", "after", "left"),
    [
        *((kind, "resp_1", "resp_2") for kind in ("response.completed", "response.incomplete")),
        *((kind, "resp_1", "") for kind in ("error", "response.failed")),
        *(("response.failed", after, "resp_1") for after in ("resp_0", "")),
    ],
)
def test_latest_response_id_is_recorded(kind: str, after: str, left: str) -> None:
    """A response replaces the previous one; a failure clears it only if it is its parent."""
    lane = make_lane()
    lane.latest_id = "resp_1"
    lane.begin(after)
    lane.receive(make_message(kind, error={"code": "x"}, response={"id": "resp_2"}))
    assert lane.latest_id == left


async def test_response_without_a_start_event_is_read() -> None:
    """Some servers start with the first item; a late event of such a response is recognized by its id."""
    lane = make_lane()
    item = make_message("response.output_item.added")
    ended = make_message("response.completed", response={"id": "resp_1"})
    for round_number in range(2):
        lane.begin("")
        lane.receive(make_message("keepalive"))
        if round_number:
            lane.receive(ended)  # once more
        lane.receive(item)
        lane.receive(ended)
        assert [(await lane.next_message()).kind for _ in range(2)] == [item.kind, ended.kind]
        assert lane.finished


def test_error_within_a_stream_does_not_end_it() -> None:
    """An error with a sequence number is followed by a failed response."""
    assert not make_message("error", sequence_number=3).is_last
    assert make_message("error", status=400).is_last
    assert make_message("response.failed").is_last


async def test_slow_reader_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages beyond the buffer limit are not stored for a slow reader."""
    monkeypatch.setattr("kedge.engines.websocket.connection.MAX_BUFFERED_BYTES", 10)
    lane = make_lane()
    lane.begin("")
    lane.receive(make_message("response.created", b"12345", response={"id": "resp_1"}))
    for _ in range(3):  # in which the reader keeps up
        lane.receive(make_message("response.output_text.delta", b"12345"))
        await lane.next_message()
    for _ in range(2):
        lane.receive(make_message("response.output_text.delta", b"12345"))
    lane.receive(make_message("response.completed", b"12345", response={"id": "resp_1"}))
    assert lane.latest_id == "resp_1"
    assert lane.busy  # until that reader has released it
    assert lane.finished
    for _ in range(3):
        await lane.next_message()
    with pytest.raises(LaneFailed, match="too far behind"):
        await lane.next_message()
    reading = asyncio.create_task(lane.next_message())
    await checkpoint()
    assert not reading.done()  # no message was stored after the limit
    reading.cancel()
