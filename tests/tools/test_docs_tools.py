"""Tests that docs/tools.md is complete; other tests run the snippets of every page."""

from pathlib import Path
from typing import get_args

from kedge.tools import ToolOutcome
from kedge.tools.tool import ExecutionOptions

PAGE = Path(__file__).parents[2] / "docs" / "tools.md"


def test_every_option_and_outcome_is_on_the_page() -> None:
    """The page names every execution option and every outcome of a call."""
    page = PAGE.read_text()
    for word in (*ExecutionOptions.__annotations__, *get_args(ToolOutcome)):
        assert f"`{word}`" in page
