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


def renumber(event: dict[str, Any]) -> None:
    event["sequence_number"] += 5


def build_steps(names: str) -> list[StreamStep]:
    """Return steps from names such as "duplicate:b", for events of the type b."""
    builders = {"duplicate": duplicate_events, "reorder": reorder_events}
    pairs = [name.split(":") for name in names.split()]
    return [builders[name](Fault("any", options={"only": only or None})) for name, only in pairs]


@for_each(
    ("names", "expected"),
    [
        ("", "56789"),
        ("duplicate:", "5566778899"),
        ("duplicate:b", "567789"),
        ("reorder:", "65879"),
        ("reorder:b", "56879"),
        ("reorder:c", "56789"),
        ("duplicate:b reorder:", "657798"),
    ],
)
@for_each("size", [1, 7, 10_000])
def test_steps_determine_the_order_of_events(names: str, expected: str, size: int) -> None:
    """Steps reorder, duplicate or edit events for any chunk size; no event is lost, and the terminator is last."""
    frames = FrameRewriter(build_steps(names), renumber)
    chunks = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    out = [frame for chunk in chunks for frame in frames.feed(chunk)]
    assert out[-1] == DONE_FRAME
    events = [json.loads(frame.partition(b"data: ")[2]) for frame in out[:-1]]
    assert "".join(str(event["sequence_number"]) for event in events) == expected
