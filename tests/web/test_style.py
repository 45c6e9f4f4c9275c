"""Tests of the style sheet: color contrast in both themes, and no external resources."""

import re
from itertools import product

import pytest

from kedge.web.page_templates import STATIC_DIR

STYLESHEET = (STATIC_DIR / "page.css").read_text("utf-8")
BACKGROUNDS = ("ground", "surface", "raised")
TEXTS = ("text", "soft", "faint", "accent-text", "good", "warn", "bad", "violet")
CHIPS = ("good", "warn", "bad", "violet")


def parse_colors(block: str) -> dict[str, str]:
    """Return the custom properties of a CSS block that are colors."""
    return dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", block))


def parse_themes() -> dict[str, dict[str, str]]:
    """Return the colors of both themes; the two definitions of the dark theme must be equal."""
    light = STYLESHEET.split("@media", 1)[0]
    dark = STYLESHEET.split('[data-theme="dark"] {', 1)[1].split("}", 1)[0]
    system = STYLESHEET.split('[data-theme="light"]) {', 1)[1].split("}", 1)[0]
    assert parse_colors(dark) == parse_colors(system)
    return {"light": parse_colors(light), "dark": parse_colors(dark)}


def luminance(color: str) -> float:
    """Return the relative luminance of a color as defined by WCAG."""
    parts = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colors."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_colors_have_sufficient_contrast(theme: str) -> None:
    """Each text color has a contrast of at least 4.5 to 1 on its background, as in WCAG level AA."""
    colors = parse_themes()[theme]
    pairs = [
        *product(TEXTS, BACKGROUNDS),
        *((name, f"{name}-ground") for name in CHIPS),
        ("soft", "sunken"),
        ("text", "accent-ground"),
        ("accent-text", "accent-ground"),
        ("on-accent", "accent"),
    ]
    low = {
        pair: ratio
        for pair in pairs
        if (ratio := round(contrast(colors[pair[0]], colors[pair[1]]), 2)) < 4.5
    }
    assert low == {}


def test_style_sheet_loads_no_external_resources() -> None:
    """The style sheet loads no fonts, images or other style sheets."""
    assert "url(" not in STYLESHEET
    assert "@import" not in STYLESHEET
    assert ":focus-visible" in STYLESHEET
    assert "prefers-reduced-motion" in STYLESHEET
