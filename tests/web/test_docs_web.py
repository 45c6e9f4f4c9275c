"""Checks that the documentation of the page and the API matches the code."""

import re
from pathlib import Path

from kedge.presentation.response_tree import MARK_DESCRIPTIONS
from kedge.web.api import OPERATIONS
from kedge.web.pages import ROUTES

DOCS = Path(__file__).parents[2] / "docs"


def test_every_page_is_documented() -> None:
    """The table in docs/web.md lists every route of the page."""
    documented = set(re.findall(r"^\| `(/[^`]*)` \|", (DOCS / "web.md").read_text(), re.MULTILINE))
    assert documented == {route.path.replace(":number}", "}") for route in ROUTES}


def test_every_operation_is_documented() -> None:
    """The table in docs/api.md lists every operation of the API."""
    documented = set(
        re.findall(r"^\| `([A-Z]+ /api[^`]*)` \|", (DOCS / "api.md").read_text(), re.MULTILINE)
    )
    assert documented == {
        f"{each.method} {each.path.replace(':number}', '}')}" for each in OPERATIONS
    }


def test_every_parameter_is_documented() -> None:
    """docs/api.md names every parameter of a query and every member of a body."""
    code = "\n".join(re.findall(r"`[^`\n]+`", (DOCS / "api.md").read_text()))
    names = {
        field.alias or name
        for each in OPERATIONS
        for shape in (each.query, each.body)
        if shape
        for name, field in shape.model_fields.items()
    }
    assert len(names) > 30
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", code)] == []


def test_every_mark_is_documented() -> None:
    """The table in docs/web.md describes every mark with the same text as the page."""
    documented = dict(
        re.findall(r"^\| `([a-z]+)` \| (.*?) \|$", (DOCS / "web.md").read_text(), re.MULTILINE)
    )
    assert documented == MARK_DESCRIPTIONS
