"""A lane: its messages in their order, what it knows to be remembered, and its bound."""

from typing import Any

import pytest

from kedge.engines.sockets import lanes
from kedge.engines.sockets.lanes import Lane, Lost, Message


def message(kind: str, data: bytes = b"x", **more: Any) -> Message:
    """A message of a server."""
    return Message(data, {"type": kind, **more})


async def test_messages_come_in_their_order_and_then_the_loss() -> None:
    """What was there before the connection broke is still read."""
    lane = Lane("a")
    lane.begin("")
    lane.take(message("response.created", response={"id": "resp_1"}))
    lane.take(message("response.in_progress"))
    lane.lose("broken")
    assert [(await lane.next()).kind for _ in range(2)] == [
        "response.created",
        "response.in_progress",
    ]
    with pytest.raises(Lost, match="broken"):
        await lane.next()


@pytest.mark.parametrize("kind", ["response.completed", "response.incomplete"])
def test_the_newest_response_is_remembered(kind: str) -> None:
    """It takes the place of the one before."""
    lane = Lane("a")
    lane.latest = "resp_1"
    lane.begin("resp_1")
    lane.take(message(kind, response={"id": "resp_2"}))
    assert lane.latest == "resp_2"


@pytest.mark.parametrize(("after", "left"), [("resp_1", ""), ("resp_0", "resp_1"), ("", "resp_1")])
@pytest.mark.parametrize("kind", ["error", "response.failed"])
def test_a_failure_makes_the_server_forget_its_parent(kind: str, after: str, left: str) -> None:
    """And nothing else."""
    lane = Lane("a")
    lane.latest = "resp_1"
    lane.begin(after)
    lane.take(message(kind, error={"code": "x"}, response={"id": "resp_2"}))
    assert lane.latest == left


async def test_what_is_left_of_the_response_before_is_passed_over() -> None:
    """A server that says things twice may do so after the next request has begun."""
    lane = Lane("a")
    lane.begin("")
    ended = message("response.completed", response={"id": "resp_1"})
    lane.take(message("response.created", response={"id": "resp_1"}))
    lane.take(ended)
    lane.begin("resp_1")
    lane.take(ended)
    lane.take(message("response.output_text.delta"))
    assert not lane.finished
    lane.take(message("response.created", response={"id": "resp_2"}))
    assert (await lane.next()).response_id == "resp_2"


def test_an_error_within_a_stream_is_not_its_end() -> None:
    """It has a number there, and a failed response follows."""
    assert not message("error", sequence_number=3).is_last
    assert message("error", status=400).is_last
    assert message("response.failed").is_last


async def test_a_reader_who_falls_too_far_behind_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it has missed is not kept for it."""
    monkeypatch.setattr(lanes, "MOST_BUFFERED", 10)
    lane = Lane("a")
    lane.begin("")
    lane.take(message("response.created", b"12345", response={"id": "resp_1"}))
    for _ in range(2):
        lane.take(message("response.output_text.delta", b"12345"))
    lane.take(message("response.completed", b"12345", response={"id": "resp_1"}))
    assert lane.latest == "resp_1"
    assert lane.busy  # until that reader has let go of it
    assert lane.finished
    for _ in range(3):
        await lane.next()
    with pytest.raises(Lost, match="too far behind"):
        await lane.next()
