"""Tests that every Kedge name in docs/concepts-map.md exists."""

import re
from importlib import import_module
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "concepts-map.md"
NAMES = sorted(set(re.findall(r"`(kedge\.[\w.]+)`", PAGE.read_text(encoding="utf-8"))))
OTHER_NAMES = (
    "SnapshotBlockIDs",
    "NewBlocksNotIn",
    "MetaKeyResponseID",
    "findBestAnchor",
    "isValidAnchor",
    "getBlocksAfterResponse",
    "buildInputFromBlocks",
    "TurnDiff",
    "StateAwareMiddleware",
    "ChatWithState",
    "AppendToState",
    "UpdateStateAfterEvent",
    "MessageLimitCompactor",
    "CompositeCompactor",
    "SplitCompactor",
    "provider_response_id",
    "refinement",
    "debate",
    "ToolCallState",
)


def resolve(name: str) -> bool:
    """Return whether a dotted name is a module, a member of one, or a member of a class."""
    parts = name.split(".")
    value: object = import_module("kedge")
    for index, part in enumerate(parts[1:], 2):
        fields = getattr(value, "__dataclass_fields__", {})
        if hasattr(value, part):
            value = getattr(value, part)
        elif part in fields:
            value = fields[part]
        else:
            try:
                value = import_module(".".join(parts[:index]))
            except ImportError:
                return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_every_name_on_the_page_exists(name: str) -> None:
    """A name of Kedge on the page can be imported or is an attribute."""
    assert resolve(name)


def test_unknown_names_are_detected() -> None:
    """The check reports a name that does not exist."""
    assert not resolve("kedge.turns.NoSuchName")
    assert len(NAMES) > 50


def test_the_names_of_other_designs_are_on_the_page() -> None:
    """Each of the names is in the first column of a table."""
    text = PAGE.read_text(encoding="utf-8")
    assert [
        name for name in OTHER_NAMES if not re.search(rf"^\|[^|]*{name}", text, re.MULTILINE)
    ] == []
