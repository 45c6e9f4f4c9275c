"""The default tools of ``kedge chat``, and loading of tools by name."""

import sys
from collections.abc import Callable
from datetime import UTC, date, datetime
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import click

from kedge.errors import ToolFailed


def load_tool(path: str) -> Callable[..., Any]:
    """Return the function at ``module:function``; modules in the current folder are found."""
    module_name, _, function_name = path.partition(":")
    if not module_name or not function_name:
        raise _invalid_tool(f"{path!r} does not name a tool; write module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise _invalid_tool(f"cannot import {module_name!r}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, each in vars(module).items() if callable(each) and name[0] != "_"]
        close = get_close_matches(function_name, names, 1)
        advice = f"; did you mean {close[0]!r}?" if close else ""
        raise _invalid_tool(f"{module_name!r} has no function named {function_name!r}{advice}")
    return function


def _invalid_tool(message: str) -> click.BadParameter:
    return click.BadParameter(message, param_hint="--tool")


def clock(zone: Annotated[str, "An IANA time zone such as Europe/Paris"] = "UTC") -> str:
    """Return the date and time in a time zone."""
    try:
        timezone = UTC if zone.upper() == "UTC" else ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError):
        raise ToolFailed(f"unknown time zone {zone!r}; use a name such as Europe/Paris") from None
    return datetime.now(timezone).isoformat(timespec="seconds")


def days_between(first: date, second: date) -> int:
    """Count the days from the first date to the second."""
    return (second - first).days


DEFAULT_TOOLS = (clock, days_between)
