"""Infer the name of a tool call that came without one, from its arguments.

Some servers lose the name of a call. If the arguments fit exactly one of the offered tools, that tool is used.

The schemas may come from an untrusted MCP server, so they are not given to a general validator: a `pattern`
can take exponential time, a `$ref` can name an address, and references to references multiply. Only the
keywords that distinguish tools are evaluated, with a bound on the number of steps for all tools together.
Other keywords are ignored: the tool validates its arguments anyway.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

MAX_ARGUMENT_CHARS = 100_000
"""Longer arguments are not parsed."""
MAX_STEPS = 20_000
"""The maximum number of values that are compared with a schema, for all tools together."""

_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: (
        (isinstance(value, int) and not isinstance(value, bool))
        or (isinstance(value, float) and value.is_integer())
    ),
}


def infer_tool_name(tools: Sequence[Mapping[str, Any]], arguments: str, custom: bool) -> str:
    """Return the name of the only offered tool that these arguments fit.

    Args:
        tools: The tools that the request offers.
        arguments: The arguments of a call that came without a name.
        custom: Whether the call has free-form input instead of JSON arguments.

    Returns:
        The name; an empty string if no tool fits, or more than one, or if that takes too long to decide.
    """
    kind = "custom" if custom else "function"
    offered = [
        cast("Mapping[str, Any]", tool.get(kind) or tool)
        for tool in tools
        if tool.get("type", "function") == kind
    ]
    fitting = offered if custom else _find_fitting(offered, arguments)
    return str(fitting[0].get("name") or "") if len(fitting) == 1 else ""


def _find_fitting(
    functions: Sequence[Mapping[str, Any]], arguments: str
) -> Sequence[Mapping[str, Any]]:
    """Return the functions whose schema the arguments match without undeclared names."""
    try:
        value = json.loads(arguments[: MAX_ARGUMENT_CHARS + 1] or "{}")
    except (ValueError, RecursionError):
        return ()
    if not isinstance(value, dict) or len(arguments) > MAX_ARGUMENT_CHARS:
        return ()
    matcher = _Matcher()
    try:
        return [each for each in functions if matcher.fits(each, value)]
    except _TooManySteps:
        return ()


class _TooManySteps(Exception):
    pass


class _Matcher:
    """Compare values with schemas, by the keywords that distinguish tools, in a limited number of steps."""

    root: Mapping[str, Any]
    steps_left = MAX_STEPS

    def fits(self, function: Mapping[str, Any], arguments: Any) -> bool:
        """Return whether arguments match the schema of a function; False if that is not a valid schema."""
        schema: Any = function.get("parameters") or function.get("input_schema") or {}
        try:
            self.root = {"additionalProperties": False, **schema}
            return self.matches(self.root, arguments)
        except (TypeError, ValueError, AttributeError, LookupError, RecursionError):
            return False

    def _spend(self, steps: int = 1) -> None:
        self.steps_left -= steps
        if self.steps_left < 0:
            raise _TooManySteps

    def matches(self, schema: Any, value: Any) -> bool:
        """Return whether a value matches a schema."""
        self._spend()
        if isinstance(schema, bool):
            return schema
        return (
            self._matches_type(schema, value)
            and self._matches_constants(schema, value)
            and self._matches_members(schema, value)
            and self._matches_combinations(schema, value)
        )

    def _matches_type(self, schema: Mapping[str, Any], value: Any) -> bool:
        types = schema.get("type", ())
        listed: Sequence[str] = [types] if isinstance(types, str) else types
        return not listed or any(_TYPES[name](value) for name in listed)

    def _matches_constants(self, schema: Mapping[str, Any], value: Any) -> bool:
        allowed: Sequence[Any] = schema.get("enum", ())
        self._spend(len(allowed))
        return ("enum" not in schema or value in allowed) and schema.get("const", value) == value

    def _matches_members(self, schema: Mapping[str, Any], value: Any) -> bool:
        if isinstance(value, dict):
            members = cast("dict[str, Any]", value)
            known: Mapping[str, Any] = schema.get("properties", {})
            others = schema.get("additionalProperties", True)
            required: Sequence[str] = schema.get("required", ())
            self._spend(len(required))
            return all(name in members for name in required) and all(
                self.matches(known.get(name, others), member) for name, member in members.items()
            )
        items = cast("list[Any]", value) if isinstance(value, list) else []
        return "items" not in schema or all(self.matches(schema["items"], each) for each in items)

    def _matches_combinations(self, schema: Mapping[str, Any], value: Any) -> bool:
        if "$ref" in schema and not self.matches(self._resolve(schema["$ref"]), value):
            return False
        choices = (schema[key] for key in ("anyOf", "oneOf") if key in schema)
        return all(any(self.matches(each, value) for each in options) for options in choices) and (
            all(self.matches(each, value) for each in schema.get("allOf", ()))
        )

    def _resolve(self, reference: str) -> Any:
        """Return a definition of the same schema."""
        found: Any = self.root
        for step in reference.removeprefix("#/").split("/"):
            found = found[step]
        return found
