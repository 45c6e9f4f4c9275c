"""The page on the invariants lists the reasons and modes of the code."""

import re
from pathlib import Path

from kedge.planning import REASONS
from kedge.planning.anchors import MODES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "concepts" / "invariant.md").read_text(encoding="utf-8")


def first_cells(title: str) -> list[str]:
    """Return the names in the first column of the table in a section."""
    section = PAGE.split(f"### {title}\n")[1].split("\n##")[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def test_documented_reasons_match_the_code() -> None:
    """The table of reasons lists the reasons of the code, in order."""
    assert first_cells("Reasons for rejecting a candidate") == list(REASONS)


def test_troubleshooting_explains_the_reasons_as_plans_do() -> None:
    """The page on troubleshooting has a row for each reason, except the structural one, in the words of a plan."""
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| .+ \| .+ \|$", page, re.MULTILINE)
    assert sorted(rows[1:]) == sorted(text for name, text in REASONS.items() if name != "split")


def test_documented_modes_match_the_code() -> None:
    """The table of modes lists the modes of the code, in order."""
    assert first_cells("Modes") == list(MODES)
