"""Events are immutable values, and ``docs/events.md`` lists them."""

import copy
import json
import pickle
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import structs

import kedge.events
import kedge.events.run
from kedge.events import (
    Event,
    ItemCompleted,
    OpaqueEvent,
    ResponseFailed,
    TextDelta,
    Usage,
)
from kedge.events.types import AnomalyKind, OutcomeStatus, ResponseFacts
from kedge.turns import FrozenMap, thaw
from wire.streams import PASSED_ON


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
    assert {type(event.item), type(event.item["content"][0])} == {FrozenMap}
    assert event.item["content"] is event.item["content"]


def test_deeply_nested_members_can_be_read() -> None:
    """A value that is nested too deeply to be made read-only does not raise an error."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert ItemCompleted({"id": deep}).item.get("id")


PAGE = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| (`.+?`|) \| .+ \|$", PAGE, re.MULTILINE)


def test_every_event_is_documented_with_all_its_members() -> None:
    """The tables list every event class with its members; each is in ``kedge.events`` or ``kedge.events.run``."""
    events = {
        each.__name__: list(each.__struct_fields__)
        for each in (*Event.__subclasses__(), *ResponseFacts.__subclasses__())
        if each.__module__.startswith("kedge.events.") and each is not ResponseFacts
    }
    assert {name: re.findall(r"`(\w+)`", members) for name, members in ROWS} == events
    assert events.keys() <= vars(kedge.events).keys() | vars(kedge.events.run).keys()


def test_every_status_and_anomaly_is_documented() -> None:
    """The page lists every status and kind of anomaly that a caller may have to match."""
    for word in (*get_args(OutcomeStatus), *get_args(AnomalyKind)):
        assert f"`{word}`" in PAGE


def test_every_event_that_is_passed_on_is_documented() -> None:
    """The page names the known types of events that are not interpreted, and no others."""
    section = PAGE.partition("### Events that are passed on")[2].partition("\n## ")[0]
    patterns = re.findall(r"`((?:response\.|keepalive)[\w.*]*)`", section)
    known = PASSED_ON | {"response.queued", "response.in_progress", "response.content_part.done"}
    assert [kind for kind in known if not any(fnmatch(kind, each) for each in patterns)] == []
    assert [each for each in patterns if not any(fnmatch(kind, each) for kind in known)] == []
