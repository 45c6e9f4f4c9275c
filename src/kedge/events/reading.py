"""Reading the members of a Responses API event, and saying what is wrong without saying what is in it."""

import re
from collections.abc import Mapping
from typing import Any, cast

from kedge.events.call import CallSeen
from kedge.events.types import Usage

Members = dict[str, Any]

CALL_ARGUMENTS = {"function_call": "arguments", "custom_tool_call": "input"}
"""The item types that are calls of our tools, with the member that holds what the model wrote."""

_NAME = re.compile(r"[A-Za-z_][\w.\-]{0,63}")
_MOST_NAMES = 12


class Malformed(Exception):
    """An event lacks a member or has one of the wrong type; the message names it."""


def text(message: Members, name: str) -> str:
    """A text that must be there."""
    value = message.get(name)
    if type(value) is not str:
        raise Malformed(f"{name} is {_named(value)}, not a string")
    return value


def word(message: Mapping[str, Any], name: str) -> str:
    """A text that may be missing."""
    value = message.get(name)
    return value if type(value) is str else ""


def index(message: Members, name: str = "output_index") -> int:
    """A place that may be missing."""
    value = message.get(name)
    return value if type(value) is int and value >= 0 else -1


def place(message: Members, name: str) -> int:
    """The place of a part in its item; the first if it is missing."""
    return max(index(message, name), 0)


def members(message: Members, name: str) -> Members:
    """An object that must be there."""
    value = message.get(name)
    if not isinstance(value, dict):
        raise Malformed(f"{name} is {_named(value)}, not an object")
    return cast("Members", value)


def facts(response: Members) -> Members:
    """What a response says about itself, as ``ResponseFacts`` names it."""
    created_at = response.get("created_at")
    echo = response.get("previous_response_id")
    return {
        "response_id": word(response, "id"),
        "model": word(response, "model"),
        "created_at": created_at if type(created_at) in (int, float) else None,
        "previous_response_id": echo if isinstance(echo, str) and echo else None,
        "echoed": "previous_response_id" in response,
        "status": word(response, "status"),
        "response": response,
    }


def usage(response: Members) -> Usage | None:
    """The tokens of a response, if the server counted them."""
    counts = response.get("usage")
    if not isinstance(counts, dict):
        return None
    given = cast("Members", counts)
    read, written = count(given, "input_tokens"), count(given, "output_tokens")
    return Usage(
        read,
        count(given.get("input_tokens_details"), "cached_tokens"),
        written,
        count(given.get("output_tokens_details"), "reasoning_tokens"),
        count(given, "total_tokens") or read + written,
        count(given.get("input_tokens_details"), "cache_write_tokens"),
    )


def is_call(item: Members) -> bool:
    """Whether an item is a call of one of our tools."""
    return word(item, "type") in CALL_ARGUMENTS


def call_seen(item: Members, output_index: int) -> CallSeen:
    """What an item says about a call."""
    kind = item["type"]
    written = item.get(CALL_ARGUMENTS[kind])
    return CallSeen(
        item.get("call_id"),
        word(item, "name"),
        word(item, "id"),
        output_index,
        kind == "custom_tool_call",
        written if isinstance(written, str) else None,
        item.get("status") == "incomplete",
    )


def error(message: Members) -> Members:
    """An error, nested under ``error`` or flat, as ``StreamFailed`` names its members."""
    inner = message.get("error", message)
    if not isinstance(inner, dict):
        return {"message": inner if isinstance(inner, str) else ""}
    given = cast("Members", inner)
    code, status = given.get("code"), message.get("status")
    kind = word(given, "type")
    return {
        "code": str(code) if isinstance(code, str | int) else "",
        "message": word(given, "message"),
        "param": word(given, "param"),
        "kind": "" if kind == "error" else kind,
        "status": status if type(status) is int else None,
    }


def described(event: str, message: object, problem: str) -> str:
    """What is wrong with an event: its type, number and the names of its members, never a value."""
    if not isinstance(message, dict):
        return f"{_safe(event)}: {problem}"
    given = cast("Members", message)
    number = given.get("sequence_number")
    names = ", ".join(_safe(name) for name in list(given)[:_MOST_NAMES])
    more = ", …" if len(given) > _MOST_NAMES else ""
    numbered = f" number {number}" if type(number) is int else ""
    return f"{_safe(event)}{numbered}: {problem}; members: {names}{more}"


def _safe(name: str) -> str:
    """A name as it is, unless it looks like something else than a name."""
    return name if _NAME.fullmatch(name) else "(unnamed)" if not name else "(unprintable)"


def count(given: object, name: str) -> int:
    """A number of tokens; none where it is missing or no number."""
    if not isinstance(given, dict):
        return 0
    value = cast("Members", given).get(name)
    return value if type(value) is int and value >= 0 else 0


def _named(value: object) -> str:
    match value:
        case None:
            return "missing"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"
