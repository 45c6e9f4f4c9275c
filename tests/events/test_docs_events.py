"""docs/events.md matches the code."""

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import get_args

import kedge.events
import kedge.events.run
from events.streams import PASSED_ON
from kedge.events import Event
from kedge.events.types import AnomalyKind, OutcomeStatus, ResponseFacts

PAGE = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| (`.+?`|) \| .+ \|$", PAGE, re.MULTILINE)


def test_every_event_is_documented_with_all_its_members() -> None:
    """The tables list every event class with its members."""
    events = {
        each.__name__: list(each.__struct_fields__)
        for each in (*Event.__subclasses__(), *ResponseFacts.__subclasses__())
        if each.__module__.startswith("kedge.events.") and each is not ResponseFacts
    }
    assert {name: re.findall(r"`(\w+)`", members) for name, members in ROWS} == events


def test_documented_events_can_be_imported() -> None:
    """Every documented event can be imported from ``kedge.events`` or ``kedge.events.run``."""
    for name, _ in ROWS:
        assert hasattr(kedge.events, name) or hasattr(kedge.events.run, name)


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
