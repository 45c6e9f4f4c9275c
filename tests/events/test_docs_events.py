"""docs/events.md says what is true."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args

import kedge.events
import kedge.events.run
from kedge.events import Event
from kedge.events.tool_calls import ToolCallState
from kedge.events.types import AnomalyKind, OutcomeStatus

PAGE = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| (`.+?`|) \| .+ \|$", PAGE, re.MULTILINE)


def test_every_event_is_documented_with_all_its_members() -> None:
    """The tables and the classes agree, name by name."""
    events = {
        each.__name__: [field.name for field in fields(each)]
        for each in Event.__subclasses__()
        if each.__module__.startswith("kedge.events.") and is_dataclass(each)
    }
    assert {name: re.findall(r"`(\w+)`", members) for name, members in ROWS} == events


def test_every_event_can_be_imported_from_one_of_two_places() -> None:
    """Those of a stream from ``kedge.events``, those of a run from ``kedge.events.run``."""
    for name, _ in ROWS:
        assert hasattr(kedge.events, name) or hasattr(kedge.events.run, name)


def test_every_status_and_anomaly_is_documented() -> None:
    """Words that a caller may have to match stand on the page."""
    for word in (*get_args(OutcomeStatus), *get_args(AnomalyKind)):
        assert f"`{word}`" in PAGE


def test_the_names_of_the_correlation_rule_exist() -> None:
    """``calls`` and ``call_ids`` are what the page says they are."""
    assert (ToolCallState().calls, ToolCallState().call_ids) == ({}, {})
