"""Events are immutable values."""

import copy
import json
import pickle
from collections.abc import Callable, Mapping
from typing import Any, cast, get_args

import pytest
from msgspec import structs

from for_each import for_each
from kedge.events import (
    Event,
    ItemCompleted,
    OpaqueEvent,
    ResponseFailed,
    StreamEvent,
    TextDelta,
    Usage,
)
from kedge.turns import FrozenMap, thaw

STREAM_EVENTS: tuple[type[Event], ...] = get_args(StreamEvent)


@for_each("kind", STREAM_EVENTS)
def test_every_event_is_a_frozen_struct(kind: type[Event]) -> None:
    """Every event is a frozen Struct with a docstring, derived from ``Event``."""
    assert issubclass(kind, Event)
    assert kind.__struct_config__.frozen
    assert kind.__doc__


def test_event_is_immutable() -> None:
    """Assigning to a member raises, and constructing an event a second time does not change it."""
    event = TextDelta("a")
    with pytest.raises(AttributeError):
        event.delta = "b"  # pyright: ignore[reportAttributeAccessIssue]
    event.__init__("b")
    assert event == TextDelta("a")


def test_content_is_not_a_part_of_the_repr() -> None:
    """The objects of a provider and its messages are left out of the ``repr`` and of the hash."""
    failed = ResponseFailed("r", response={"a": ["secret"]}, code="c", message="secret")
    assert repr(failed).startswith("ResponseFailed(response_id='r', ")
    assert "secret" not in repr(failed) + repr(OpaqueEvent("a", {"b": "secret"}))
    assert hash(failed) == hash(structs.replace(failed)) != hash(ResponseFailed("s"))


def test_usage_can_be_added() -> None:
    """Adding the usage of two responses adds each member."""
    assert Usage(1, 2, 3, 4, 5, 6) + Usage(10, 20, 30, 40, 50, 60) == Usage(11, 22, 33, 44, 55, 66)


ITEM: dict[str, Any] = {
    "type": "message",
    "content": [{"text": "hi", "lists": [[1, {"a": 2}], []]}],
    "nested": {"object": {"list": [1]}},
}


def make_event() -> tuple[dict[str, Any], ItemCompleted]:
    """Return an item, and an event with it."""
    item = copy.deepcopy(ITEM)
    return item, ItemCompleted(item, output_index=1)


def test_event_with_an_object_can_be_copied() -> None:
    """The object of an event equals the provider's, and so do copies of the event."""
    item, event = make_event()
    assert structs.asdict(event) == {"item": item, "output_index": 1}
    for read in (lambda: None, lambda: event.item["content"][0]["lists"], event.item.items):
        read()
        assert json.loads(json.dumps(thaw(event.item))) == item
        assert event == ItemCompleted(item, output_index=1)
        assert copy.deepcopy(event) == copy.copy(event) == event
        assert pickle.loads(pickle.dumps(event)) == event  # noqa: S301


READERS: dict[str, Callable[[Mapping[str, Any]], tuple[Any, Any]]] = {
    "index": lambda item: (item["content"], item["nested"]),
    "get": lambda item: (item.get("content"), item.get("nested")),
    "items": lambda item: (dict(item.items())["content"], dict(item.items())["nested"]),
    "values": lambda item: tuple(list(item.values())[1:]),  # pyright: ignore[reportReturnType]
    "dict": lambda item: (dict(item)["content"], dict(item)["nested"]),
    "unpacking": lambda item: ({**item}["content"], {**item}["nested"]),
    "copy": lambda item: (copy.copy(item)["content"], copy.deepcopy(item)["nested"]),
    "union": lambda item: ((cast("Any", item) | {})["content"], item["nested"]),
}


@for_each("read", READERS.values())
def test_nested_members_of_an_object_are_read_only(
    read: Callable[[Mapping[str, Any]], tuple[Any, Any]],
) -> None:
    """No object or array inside the object of an event can be changed, however it is read."""
    item, event = make_event()
    content, nested = read(event.item)
    arrays = (content, content[0]["lists"], content[0]["lists"][0], nested["object"]["list"])
    objects = (event.item, content[0], content[0]["lists"][0][1], nested, nested["object"])
    assert {*map(type, arrays)} == {tuple}
    assert {*map(type, objects)} == {FrozenMap}
    assert event.item == item == ITEM
    assert event.item["content"] is event.item["content"]


def test_deeply_nested_members_can_be_read() -> None:
    """A value that is nested too deeply to be made read-only does not raise an error."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert ItemCompleted({"id": deep}).item.get("id")
