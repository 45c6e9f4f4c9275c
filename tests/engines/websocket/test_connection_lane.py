"""A lane: its messages in their order, what it knows to be remembered, and its bound."""

from typing import Any

import pytest

from kedge.engines.websocket.connection import Lane, LaneFailed, SocketMessage


def make_message(kind: str, data: bytes = b"x", **more: Any) -> SocketMessage:
    """A message of a server."""
    return SocketMessage(data, {"type": kind, **more})


async def test_messages_come_in_their_order_and_then_the_loss() -> None:
    """What was there before the connection broke is still read."""
    lane = Lane("a")
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


async def test_a_response_with_the_id_of_the_one_before_is_read() -> None:
    """A late, repeated event of the one before is not."""
    lane = Lane("a")
    created = make_message("response.created", response={"id": "resp_1"})
    completed = make_message("response.completed", response={"id": "resp_1"})
    for _ in range(2):
        lane.begin("")
        for message in (completed, created, completed):  # the first one is late in the second round
            lane.receive(message)
    assert [(await lane.next_message()).kind for _ in range(2)] == [created.kind, completed.kind]


@pytest.mark.parametrize("kind", ["response.completed", "response.incomplete"])
def test_the_newest_response_is_remembered(kind: str) -> None:
    """It takes the place of the one before."""
    lane = Lane("a")
    lane.latest_id = "resp_1"
    lane.begin("resp_1")
    lane.receive(make_message(kind, response={"id": "resp_2"}))
    assert lane.latest_id == "resp_2"


@pytest.mark.parametrize(("after", "left"), [("resp_1", ""), ("resp_0", "resp_1"), ("", "resp_1")])
@pytest.mark.parametrize("kind", ["error", "response.failed"])
def test_a_failure_makes_the_server_forget_its_parent(kind: str, after: str, left: str) -> None:
    """And nothing else."""
    lane = Lane("a")
    lane.latest_id = "resp_1"
    lane.begin(after)
    lane.receive(make_message(kind, error={"code": "x"}, response={"id": "resp_2"}))
    assert lane.latest_id == left


async def test_what_is_left_of_the_response_before_is_passed_over() -> None:
    """A server that says things twice may do so after the next request has begun."""
    lane = Lane("a")
    lane.begin("")
    ended = make_message("response.completed", response={"id": "resp_1"})
    lane.receive(make_message("response.created", response={"id": "resp_1"}))
    lane.receive(ended)
    lane.begin("resp_1")
    lane.receive(ended)
    lane.receive(make_message("response.output_text.delta"))
    assert not lane.finished
    lane.receive(make_message("response.created", response={"id": "resp_2"}))
    assert (await lane.next_message()).response_id == "resp_2"


def test_an_error_within_a_stream_is_not_its_end() -> None:
    """It has a number there, and a failed response follows."""
    assert not make_message("error", sequence_number=3).is_last
    assert make_message("error", status=400).is_last
    assert make_message("response.failed").is_last


async def test_a_reader_who_falls_too_far_behind_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it has missed is not kept for it."""
    monkeypatch.setattr("kedge.engines.websocket.connection.MAX_BUFFERED_BYTES", 10)
    lane = Lane("a")
    lane.begin("")
    lane.receive(make_message("response.created", b"12345", response={"id": "resp_1"}))
    for _ in range(2):
        lane.receive(make_message("response.output_text.delta", b"12345"))
    lane.receive(make_message("response.completed", b"12345", response={"id": "resp_1"}))
    assert lane.latest_id == "resp_1"
    assert lane.busy  # until that reader has let go of it
    assert lane.finished
    for _ in range(3):
        await lane.next_message()
    with pytest.raises(LaneFailed, match="too far behind"):
        await lane.next_message()
