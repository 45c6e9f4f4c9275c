"""Events are values: frozen, small, and all of one family."""

from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import get_args

import pytest

from kedge.events import Event, StreamEvent, TextDelta, Usage

STREAM_EVENTS: tuple[type[Event], ...] = get_args(StreamEvent)


@pytest.mark.parametrize("kind", STREAM_EVENTS, ids=lambda kind: kind.__name__)
def test_every_event_is_a_frozen_slotted_value_of_the_one_family(kind: type[Event]) -> None:
    """What has happened cannot be changed, and takes no more room than it needs."""
    assert issubclass(kind, Event)
    assert is_dataclass(kind)
    assert kind.__doc__
    assert not hasattr(kind(*["x"] * len(fields(kind))), "__dict__")


def test_an_event_cannot_change() -> None:
    """Assigning to a member is refused."""
    event = TextDelta("a")
    with pytest.raises(FrozenInstanceError):
        event.delta = "b"  # pyright: ignore[reportAttributeAccessIssue]


def test_usage_adds_up_over_the_responses_of_a_run() -> None:
    """The tokens of two responses are added member by member."""
    assert Usage(1, 2, 3, 4, 5, 6) + Usage(10, 20, 30, 40, 50, 60) == Usage(11, 22, 33, 44, 55, 66)
