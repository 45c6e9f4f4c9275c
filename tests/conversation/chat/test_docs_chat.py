"""Checks of the documentation of Chat and compaction against the code."""

import inspect
import re
from pathlib import Path

from kedge import compaction
from kedge.conversation import DISCARD_REASONS, Chat

DOCS = Path(__file__).parents[3] / "docs"


def test_every_reason_to_discard_a_state_is_on_the_page() -> None:
    """The documented reasons equal those of the code."""
    page = (DOCS / "chat.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", page, re.MULTILINE))
    assert {reason: rows.get(reason) for reason in DISCARD_REASONS} == DISCARD_REASONS


def test_every_method_and_compactor_is_on_a_page() -> None:
    """Every public method of `Chat`, and every compactor, trigger and counter is on its documentation page."""
    page = (DOCS / "chat.md").read_text()
    methods = [name for name in vars(Chat) if not name.startswith("_")]
    missing = [name for name in methods if not re.search(rf"\b{name}\(|chat\.{name}\.", page)]
    assert missing == []
    page = (DOCS / "compaction.md").read_text()
    compactors = [
        name
        for name, value in vars(compaction).items()
        if inspect.isclass(value) and name.endswith(("Compactor", "Trigger", "Triggers", "Counter"))
    ]
    protocols = {"Compactor", "CompactionTrigger", "CompactionStrategy", "BlockCounter"}
    assert [name for name in compactors if name not in protocols and name not in page] == []
