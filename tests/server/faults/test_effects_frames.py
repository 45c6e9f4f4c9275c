"""Rewriting of event streams by faults."""

import json
from typing import Any

from for_each import for_each
from kedge.server.faults.effects import (
    Fault,
    FrameRewriter,
    StreamStep,
    duplicate_events,
    encode_frame,
    reorder_events,
)
from kedge.server.sse import DONE_FRAME

EVENTS = [{"type": kind, "sequence_number": n} for n, kind in enumerate("aabac")]
STREAM = b"".join(map(encode_frame, EVENTS)) + DONE_FRAME


def select(only: str | None) -> Fault:
    """Return a fault for events of one type, or for all."""
    return Fault("any", options={"only": only})


def apply_steps(steps: list[StreamStep], size: int = 7, edit: Any = None) -> str:
    """Feed the stream in chunks of a size and return the sequence numbers of the resulting events."""
    frames = FrameRewriter(steps, edit)
    out = [
        frame for at in range(0, len(STREAM), size) for frame in frames.feed(STREAM[at : at + size])
    ]
    assert out[-1] == DONE_FRAME
    events = [json.loads(frame.partition(b"data: ")[2]) for frame in out[:-1]]
    return "".join(str(event["sequence_number"]) for event in events)


@for_each(
    ("steps", "expected"),
    [
        ([], "01234"),
        ([duplicate_events(select(None))], "0011223344"),
        ([duplicate_events(select("b"))], "012234"),
        ([reorder_events(select(None))], "10324"),
        ([reorder_events(select("b"))], "01324"),
        ([reorder_events(select("c"))], "01234"),
        ([duplicate_events(select("b")), reorder_events(select(None))], "102243"),
    ],
)
@for_each("size", [1, 7, 10_000])
def test_steps_determine_the_order_of_events(
    steps: list[StreamStep], expected: str, size: int
) -> None:
    """Steps reorder or duplicate events for any chunk size; no event is lost, and the terminator is last."""
    assert apply_steps(steps, size) == expected


def test_an_edit_changes_each_event() -> None:
    """An edit changes each event before it is sent."""

    def edit(event: dict[str, Any]) -> None:
        event["sequence_number"] += 5

    assert apply_steps([], edit=edit) == "56789"
