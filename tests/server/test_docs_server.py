"""The server's page names every route, every option and every limit."""

import re
from pathlib import Path

import click

from kedge.cli.serve import command
from kedge.server.app import ROUTES
from kedge.server.models import DEFAULT_WINDOW
from kedge.server.settings import DAY, Limits, Settings

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text()


def test_every_route_stands_on_the_page_and_no_other() -> None:
    """In the table of routes, once each."""
    written = re.findall(r"^\| `([A-Z]+ /\S+)` \|", PAGE, re.MULTILINE)
    served = [
        f"{method} {route.path}"
        for route in ROUTES
        for method in route.methods or ()
        if method != "HEAD"
    ]
    assert sorted(written) == sorted(served)


def test_every_option_stands_on_the_page_and_no_other() -> None:
    """In the table of options."""
    rows = re.findall(r"^\| (`--.*?) \|", PAGE, re.MULTILINE)
    written = [name for row in rows for name in re.findall(r"--[a-z-]+", row)]
    options = [o for o in command.params if isinstance(o, click.Option)]
    assert sorted(written) == sorted(option.opts[-1] for option in options)
    assert all(option.help for option in options)


def test_the_numbers_on_the_page_are_the_real_ones() -> None:
    """Limits, retention and the window."""
    limits = Limits()
    assert limits.body_bytes == 32_000_000
    assert limits.header_bytes == 32 * 1024
    assert (limits.read_seconds, limits.idle_seconds, limits.answer_seconds) == (60, 75, 600)
    assert limits.shutdown_seconds == 10
    assert DEFAULT_WINDOW == 400_000
    assert Settings().retention == 30 * DAY
