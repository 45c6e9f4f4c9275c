"""The page on planning tells the truth about the reasons and the modes."""

import re
from pathlib import Path

from kedge.planning import MODES, REASONS

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")


def first_cells(title: str) -> list[str]:
    """The names in the first column of the table in a section."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def test_every_reason_is_on_the_page_and_no_other() -> None:
    """The table of reasons is that of the code."""
    assert first_cells("Reasons for rejecting a candidate") == list(REASONS)


def test_every_mode_is_on_the_page_and_no_other() -> None:
    """The table of modes is that of the code."""
    assert first_cells("Modes") == list(MODES)
