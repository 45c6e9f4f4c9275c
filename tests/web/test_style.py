"""Tests of the style sheet; the browser checks its contrasts and that it loads nothing."""

import re

from kedge.web.page_templates import STATIC_DIR

STYLESHEET = (STATIC_DIR / "page.css").read_text("utf-8")


def test_both_definitions_of_the_dark_theme_are_equal() -> None:
    """The theme that a user selects has the colors of the one that the system selects."""
    dark, system = (
        re.findall(r"--[a-z-]+: #[0-9a-f]{6};", STYLESHEET.split(start, 1)[1].split("}", 1)[0])
        for start in ('[data-theme="dark"] {', '[data-theme="light"]) {')
    )
    assert dark == system != []
    assert ":focus-visible" in STYLESHEET
    assert "prefers-reduced-motion" in STYLESHEET
