"""Reading the members of a Responses API event, and saying what is wrong without saying what is in it."""

import re
from collections.abc import Mapping
from typing import Any, cast

from kedge.events.tool_calls import ToolCallUpdate
from kedge.events.types import Usage

JsonObject = dict[str, Any]

CALL_ARGUMENTS = {"function_call": "arguments", "custom_tool_call": "input"}
"""The item types that are calls of our tools, with the member that holds what the model wrote."""

_NAME_PATTERN = re.compile(r"[A-Za-z_][\w.\-]{0,63}")
_MAX_NAMES = 12


class MalformedEvent(Exception):
    """An event lacks a member or has one of the wrong type; the message names it."""


def require_text(message: JsonObject, name: str) -> str:
    """A text that must be there."""
    value = message.get(name)
    if type(value) is not str:
        raise MalformedEvent(f"{name} is {_type_name(value)}, not a string")
    return value


def get_text(message: Mapping[str, Any], name: str) -> str:
    """A text that may be missing."""
    value = message.get(name)
    return value if type(value) is str else ""


def get_index(message: JsonObject, name: str = "output_index") -> int:
    """A place that may be missing."""
    value = message.get(name)
    return value if type(value) is int and value >= 0 else -1


def get_part_index(message: JsonObject, name: str) -> int:
    """The place of a part in its item; the first if it is missing."""
    return max(get_index(message, name), 0)


def require_object(message: JsonObject, name: str) -> JsonObject:
    """An object that must be there."""
    value = message.get(name)
    if not isinstance(value, dict):
        raise MalformedEvent(f"{name} is {_type_name(value)}, not an object")
    return cast("JsonObject", value)


def read_facts(response: JsonObject) -> JsonObject:
    """What a response says about itself, as ``ResponseFacts`` names it."""
    created_at = response.get("created_at")
    echo = response.get("previous_response_id")
    return {
        "response_id": get_text(response, "id"),
        "model": get_text(response, "model"),
        "created_at": created_at if type(created_at) in (int, float) else None,
        "previous_response_id": echo if isinstance(echo, str) and echo else None,
        "echoed": "previous_response_id" in response,
        "status": get_text(response, "status"),
        "response": response,
    }


def read_usage(response: JsonObject) -> Usage | None:
    """The tokens of a response, if the server counted them."""
    counts = response.get("usage")
    if not isinstance(counts, dict):
        return None
    given = cast("JsonObject", counts)
    read, written = get_count(given, "input_tokens"), get_count(given, "output_tokens")
    return Usage(
        read,
        get_count(given.get("input_tokens_details"), "cached_tokens"),
        written,
        get_count(given.get("output_tokens_details"), "reasoning_tokens"),
        get_count(given, "total_tokens") or read + written,
        get_count(given.get("input_tokens_details"), "cache_write_tokens"),
    )


def is_tool_call(item: JsonObject) -> bool:
    """Whether an item is a call of one of our tools."""
    return get_text(item, "type") in CALL_ARGUMENTS


def read_call(item: JsonObject, output_index: int) -> ToolCallUpdate:
    """What an item says about a call."""
    kind = item["type"]
    written = item.get(CALL_ARGUMENTS[kind])
    return ToolCallUpdate(
        item.get("call_id"),
        get_text(item, "name"),
        get_text(item, "id"),
        output_index,
        kind == "custom_tool_call",
        written if isinstance(written, str) else None,
        item.get("status") == "incomplete",
    )


def read_error(message: JsonObject) -> JsonObject:
    """An error, nested under ``error`` or flat, as ``StreamFailed`` names its members."""
    inner = message.get("error", message)
    if not isinstance(inner, dict):
        return {"message": inner if isinstance(inner, str) else ""}
    given = cast("JsonObject", inner)
    code, status = given.get("code"), message.get("status")
    kind = get_text(given, "type")
    return {
        "code": str(code) if isinstance(code, str | int) else "",
        "message": get_text(given, "message"),
        "param": get_text(given, "param"),
        "kind": "" if kind == "error" else kind,
        "status": status if type(status) is int else None,
    }


def describe_event(event: str, message: object, problem: str) -> str:
    """What is wrong with an event: its type, number and the names of its members, never a value."""
    if not isinstance(message, dict):
        return f"{_safe_name(event)}: {problem}"
    given = cast("JsonObject", message)
    number = given.get("sequence_number")
    names = ", ".join(_safe_name(name) for name in list(given)[:_MAX_NAMES])
    more = ", …" if len(given) > _MAX_NAMES else ""
    numbered = f" number {number}" if type(number) is int else ""
    return f"{_safe_name(event)}{numbered}: {problem}; members: {names}{more}"


def _safe_name(name: str) -> str:
    """A name as it is, unless it looks like something else than a name."""
    return name if _NAME_PATTERN.fullmatch(name) else "(unnamed)" if not name else "(unprintable)"


def get_count(given: object, name: str) -> int:
    """A number of tokens; none where it is missing or no number."""
    if not isinstance(given, dict):
        return 0
    value = cast("JsonObject", given).get(name)
    return value if type(value) is int and value >= 0 else 0


def _type_name(value: object) -> str:
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
