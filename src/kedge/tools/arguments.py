"""Describe invalid arguments of a tool call so that a model can correct them.

Each problem names the argument, the error and the expected schema. Values are never repeated, because the model
knows what it sent, and the text is also logged. Pydantic adds the labels of union branches to the
locations of its errors; a path here contains only steps that exist in the arguments.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, cast

from kedge.turns.block_codec import name_type
from kedge.turns.frozen_json import thaw

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails, ValidationError

PathStep = str | int
ArgumentPath = tuple[PathStep, ...]

MAX_EXPECTED_CHARS = 400
MAX_PROBLEMS = 12


def describe_errors(error: "ValidationError", text: str, schema: Mapping[str, Any]) -> list[str]:
    """Return one line for each invalid argument."""
    from pydantic_core import from_json

    details = error.errors(include_url=False, include_context=False)
    if details[0]["type"] in ("json_invalid", "string_unicode"):
        return [
            f"the arguments are not valid JSON ({_error_reason(details[0])}); write one JSON object"
        ]
    value: object = from_json(text)
    if (kind := name_type(value)) != "an object":
        return [f"the arguments are {kind}; write one JSON object"]
    lines = [
        _describe_problem(path, found, schema)
        for path, found in _group_by_path(details, value).items()
    ]
    more = len(lines) - MAX_PROBLEMS
    return lines[:MAX_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])


def check_argument_names(value: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """Return one line for each argument that is missing or unknown in an explicit schema."""
    known: Mapping[str, Any] = schema.get("properties") or {}
    is_closed = schema.get("additionalProperties") is False
    missing = [name for name in schema.get("required") or () if name not in value]
    unknown = [name for name in value if name not in known] if is_closed else []
    more = len(missing) + len(unknown) - MAX_PROBLEMS
    lines = [_describe_missing((name,), schema) for name in missing[:MAX_PROBLEMS]]
    lines += [_describe_unknown((name,), known) for name in unknown[: MAX_PROBLEMS - len(lines)]]
    return lines + ([f"and {more} more"] if more > 0 else [])


def _group_by_path(
    details: Iterable["ErrorDetails"], value: object
) -> dict[ArgumentPath, list["ErrorDetails"]]:
    found: dict[ArgumentPath, list[ErrorDetails]] = {}
    for detail in details:
        found.setdefault(_argument_path(detail, value), []).append(detail)
    return found


def _argument_path(detail: "ErrorDetails", value: Any) -> ArgumentPath:
    """Return the steps that exist in the arguments, and the missing one."""
    path: list[PathStep] = []
    for i, step in enumerate(detail["loc"]):
        absent = detail["type"] == "missing" and i == len(detail["loc"]) - 1
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            if not absent:
                continue
        path.append(step)
    return tuple(path)


def _describe_problem(
    path: ArgumentPath, found: Sequence["ErrorDetails"], schema: Mapping[str, Any]
) -> str:
    kinds = {detail["type"] for detail in found}
    if kinds == {"missing"}:
        return _describe_missing(path, schema)
    if kinds == {"extra_forbidden"}:
        return _describe_unknown(path, _find_schema(path[:-1], schema).get("properties", {}))
    reasons = "; or: ".join(dict.fromkeys(_error_reason(detail) for detail in found))
    return f"{_format_path(path)}: {reasons}{_format_expected(path, schema)}"


def _describe_missing(path: ArgumentPath, schema: Mapping[str, Any]) -> str:
    return f"{_format_path(path)}: it is required and missing{_format_expected(path, schema)}"


def _describe_unknown(path: ArgumentPath, known: Iterable[str]) -> str:
    names = list(known)
    guess = get_close_matches(str(path[-1]), names, n=1)
    hint = (
        f"did you mean {guess[0]}?" if guess else f"the arguments are: {', '.join(names) or 'none'}"
    )
    return f"{_format_path(path)}: unknown argument; {hint}"


def _error_reason(detail: "ErrorDetails") -> str:
    message = detail["msg"].removeprefix("Invalid JSON: ").removeprefix("Value error, ")
    return message.replace("Input should", "it should", 1)


def _format_path(path: ArgumentPath) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(steps).removeprefix(".") or "the arguments"


def _format_expected(path: ArgumentPath, schema: Mapping[str, Any]) -> str:
    expected = _find_schema(path, schema)
    shown = {key: thaw(each) for key, each in expected.items() if key not in ("default", "$defs")}
    text = json.dumps(shown, ensure_ascii=False)
    return f"; expected {text}" if shown and len(text) <= MAX_EXPECTED_CHARS else ""


def _find_schema(path: ArgumentPath, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema at a path, or an empty one inside a union."""
    current = root
    for step in path:
        current = _strip_null(current, root)
        inner: object = None
        if isinstance(step, int):
            inner = current.get("items")
        elif step in current.get("properties", {}):
            inner = current["properties"][step]
        elif "properties" not in current:
            inner = current.get("additionalProperties")
        if not isinstance(inner, Mapping):
            return {}
        current = _resolve_ref(cast("Mapping[str, Any]", inner), root)
    return current


def _strip_null(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of an optional value without null."""
    choices = [c for c in schema.get("anyOf", ()) if c.get("type") != "null"]
    return _resolve_ref(choices[0], root) if len(choices) == 1 else schema


def _resolve_ref(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return schema
    siblings = {key: value for key, value in schema.items() if key != "$ref"}
    return {**root.get("$defs", {}).get(reference.rpartition("/")[2], {}), **siblings}
