"""The page on planning tells the truth about the reasons."""

import re
from pathlib import Path

from kedge.planning import REASONS

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()


def test_every_reason_is_on_the_page_and_no_other() -> None:
    """The table of reasons is that of the code."""
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == list(REASONS)
