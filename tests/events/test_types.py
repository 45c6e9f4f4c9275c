"""Events are immutable values."""

import copy
import json
import pickle
from dataclasses import FrozenInstanceError, asdict, is_dataclass
from typing import get_args

import pytest

from kedge.events import Event, ItemCompleted, StreamEvent, TextDelta, Usage

STREAM_EVENTS: tuple[type[Event], ...] = get_args(StreamEvent)


@pytest.mark.parametrize("kind", STREAM_EVENTS, ids=lambda kind: kind.__name__)
def test_every_event_is_a_slotted_dataclass(kind: type[Event]) -> None:
    """Every event is a dataclass with slots and a docstring, derived from ``Event``."""
    assert issubclass(kind, Event)
    assert is_dataclass(kind)
    assert kind.__doc__
    assert all("__slots__" in vars(base) for base in kind.__mro__[:-1])


def test_event_is_immutable() -> None:
    """Assigning to a member raises ``FrozenInstanceError``."""
    event = TextDelta("a")
    with pytest.raises(FrozenInstanceError):
        event.delta = "b"  # pyright: ignore[reportAttributeAccessIssue]


def test_usage_can_be_added() -> None:
    """Adding the usage of two responses adds each member."""
    assert Usage(1, 2, 3, 4, 5, 6) + Usage(10, 20, 30, 40, 50, 60) == Usage(11, 22, 33, 44, 55, 66)


def test_event_with_an_object_can_be_copied_and_encoded() -> None:
    """The object of an event cannot be changed, but is accepted wherever a dict is."""
    item = {"type": "message", "content": [{"text": "hi"}]}
    event = ItemCompleted(item, output_index=1)
    with pytest.raises(TypeError, match="read-only"):
        event.item["type"] = "other"  # pyright: ignore[reportIndexIssue]
    assert asdict(event) == {"item": item, "output_index": 1}
    assert json.loads(json.dumps(event.item)) == item
    assert copy.deepcopy(event) == event
    assert pickle.loads(pickle.dumps(event)) == event  # noqa: S301
