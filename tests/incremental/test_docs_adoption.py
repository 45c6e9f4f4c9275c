"""Tests that docs/adoption.md lists every reason for passing a request through."""

from pathlib import Path

from kedge.incremental import PASS_THROUGH_REASONS

PAGE = (Path(__file__).parents[2] / "docs" / "adoption.md").read_text(encoding="utf-8")


def test_every_reason_is_on_the_page() -> None:
    """The table of reasons on the page equals that of the code."""
    rows = [f"| `{reason}` | {text} |" for reason, text in PASS_THROUGH_REASONS.items()]
    assert "\n".join(rows) in PAGE
