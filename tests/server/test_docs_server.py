"""The server's documentation page lists every route, option and limit."""

import re
from pathlib import Path

import click

from kedge.cli.serve import command
from kedge.server.app import ROUTES
from kedge.server.models import DEFAULT_WINDOW
from kedge.server.prompt_cache import MIN_CACHED_TOKENS
from kedge.server.schema.items import MAX_TEXT_LENGTH
from kedge.server.schema.validators import MAX_DEPTH
from kedge.server.settings import DAY, Limits, Settings

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


def test_page_has_the_actual_limits() -> None:
    """The numbers in the table of limits and in the text equal the defaults of the code."""
    limits, minute, megabyte = Limits(), 60, 1024 * 1024
    for shown in (
        f"| request body | {limits.body_bytes // 10**6} MB (`--max-body-mb`), {MAX_DEPTH} levels",
        f"| headers | {limits.header_bytes // 1024} KB |",
        f"| time to receive a body | {limits.read_seconds:.0f} seconds |",
        f"for the headers of one | {limits.idle_seconds:.0f} seconds |",
        f"| time to write a response | {limits.answer_seconds / minute:.0f} minutes",
        f"| one text | {MAX_TEXT_LENGTH:,} characters |",
        f"| context window | {DEFAULT_WINDOW:,} tokens |",
        f"| life of a WebSocket | {limits.socket_seconds / minute:.0f} minutes",
        f"| lanes on it | {limits.socket_lanes} with names",
        f"| responses on it | {limits.socket_in_flight} in flight, {limits.socket_waiting} waiting",
        f"one remembered for each lane ({limits.socket_memory_bytes // megabyte} MB) |",
        f"| `--retention-days` | days that responses are stored: {Settings().retention / DAY:.0f} |",
        f"{limits.background_running} run at once, {limits.background_waiting} may wait",
        f"five minutes after the end, {limits.stream_bytes // megabyte} MB",
        f"from {MIN_CACHED_TOKENS:,} tokens on",
    ):
        assert shown in PAGE
    assert limits.stream_seconds == 5 * minute
    assert limits.shutdown_seconds == 10
    assert "get ten seconds to finish" in PAGE
