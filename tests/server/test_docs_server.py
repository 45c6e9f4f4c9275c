"""The server's documentation page lists every route and option."""

import re
from pathlib import Path

import click

from kedge.cli.serve import command
from kedge.server.app import ROUTES

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text()


def test_page_lists_exactly_the_routes() -> None:
    """The table of routes has each route once and no other."""
    documented = re.findall(r"^\| `([A-Z]+ /\S+)` \|", PAGE, re.MULTILINE)
    served = [
        f"{method} {route.path}"
        for route in ROUTES
        for method in route.methods or ()
        if method != "HEAD"
    ]
    assert sorted(documented) == sorted(served)


def test_page_lists_exactly_the_options() -> None:
    """The table of options has each option of the command, and every option has a help text."""
    rows = re.findall(r"^\| (`--.*?) \|", PAGE, re.MULTILINE)
    documented = [name for row in rows for name in re.findall(r"--[a-z-]+", row)]
    options = [o for o in command.params if isinstance(o, click.Option)]
    assert sorted(documented) == sorted(option.opts[-1] for option in options)
    assert all(option.help for option in options)
