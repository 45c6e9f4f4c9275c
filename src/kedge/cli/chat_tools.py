"""The tools of the command line: default ones, functions by name, MCP servers, and approval of calls."""

import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, date, datetime, tzinfo
from typing import TYPE_CHECKING, Any

import click

from kedge._internal.display import escape_text
from kedge.cli.base import echo, repeated_option
from kedge.errors import InvalidWorkflow, ToolFailed

if TYPE_CHECKING:
    from kedge.tools import Decision, Tool, Toolbox
    from kedge.turns import ToolCallBlock

MAX_SHOWN_ARGUMENTS = 2_000
"""The maximum number of characters of a call's arguments in a question to the user."""
MAX_SHOWN_NAME = 200
"""The maximum number of characters of a tool's name in such a question."""


mcp_option = repeated_option(
    "--mcp", "mcp_servers", "COMMAND|URL", "Offer the tools of an MCP server (extra mcp)."
)
"""Adds ``--mcp``."""


@asynccontextmanager
async def open_mcp_servers(servers: Sequence[str]) -> "AsyncGenerator[list[Toolbox]]":
    """Connect to MCP servers, and yield a toolbox for each."""
    async with AsyncExitStack() as stack:
        boxes: list[Toolbox] = []
        for server in servers:
            from kedge.mcp import mcp_tools  # which needs an extra

            boxes.append(await stack.enter_async_context(mcp_tools(server)))
        yield boxes


async def ask_approval(call: "ToolCallBlock") -> "Decision":
    """Ask at the terminal whether a call may run; without a terminal it is denied."""
    from kedge.tools import Allow, Deny

    if not sys.stdin.isatty():
        return Deny("there is no terminal at which it could be approved")
    echo(f"\n{format_approval(call.name, call.arguments)} [y/N]: ", nl=False, err=True)
    line = await _read_line()
    if line.strip().lower() in ("y", "yes"):
        return Allow()
    return Deny("the user denied it")


def format_approval(name: str, arguments: str) -> str:
    """Return the question about a call; the name is at its end, where no argument can move it out of sight."""
    shown_arguments = escape_text(arguments[:MAX_SHOWN_ARGUMENTS])
    hidden = len(arguments) - MAX_SHOWN_ARGUMENTS
    if hidden > 0:
        shown_arguments += f"… ({hidden:,} more characters are hidden)"
    shown_name = escape_text(name[:MAX_SHOWN_NAME])
    if len(name) > MAX_SHOWN_NAME:
        shown_name += "…"
    return f"Arguments: {shown_arguments}\nRun {shown_name}?"


async def _read_line() -> str:
    """Read a line of standard input without a thread, which Ctrl-C could not cancel."""
    import asyncio

    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sys.stdin, readable.set)
    try:
        await readable.wait()
        return sys.stdin.readline()
    finally:
        loop.remove_reader(sys.stdin)


def load_tool(reference: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` refers to; modules in the current folder are found."""
    from kedge.workflows.specs import load_function

    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return load_function(reference)
    except InvalidWorkflow as error:
        raise click.BadParameter(str(error), param_hint="--tool") from error


def clock(zone: str = "UTC") -> str:
    """Return the date and time in a time zone."""
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    try:
        timezone: tzinfo = UTC
        if zone.upper() != "UTC":
            timezone = ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, AttributeError):
        raise ToolFailed(f"unknown time zone {zone!r}; use a name such as Europe/Paris") from None
    return datetime.now(timezone).isoformat(timespec="seconds")


def days_between(first: str, second: str) -> int:
    """Count the days from the first date to the second."""
    return (_parse_date(second) - _parse_date(first)).days


def _parse_date(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except (ValueError, TypeError):
        raise ToolFailed(f"{text!r} is not a date; use a form such as 2026-01-31") from None


ZONE_SCHEMA = {
    "default": "UTC",
    "description": "An IANA time zone such as Europe/Paris",
    "type": "string",
}
DATE_SCHEMA = {"format": "date", "type": "string"}
CLOCK_PARAMETERS = {
    "additionalProperties": False,
    "properties": {"zone": ZONE_SCHEMA},
    "type": "object",
}
DAYS_BETWEEN_PARAMETERS = {
    "additionalProperties": False,
    "properties": {"first": DATE_SCHEMA, "second": DATE_SCHEMA},
    "required": ["first", "second"],
    "type": "object",
}


def create_default_tools() -> "list[Tool[..., Any]]":
    """Return the tools of a chat started without ``--tool`` and ``--mcp``.

    Their schemas are written out: to import pydantic, which generates schemas, takes a tenth of the time in which a
    chat starts. Their docstrings are the descriptions that the model reads.
    """
    from kedge.tools import tool

    return [
        tool(clock, description=clock.__doc__ or "", parameters=CLOCK_PARAMETERS),
        tool(
            days_between,
            description=days_between.__doc__ or "",
            parameters=DAYS_BETWEEN_PARAMETERS,
        ),
    ]
