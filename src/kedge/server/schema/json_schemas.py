"""The JSON schemas of functions and of the text format of a request, as the live API accepts them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from kedge.server import errors
from kedge.server.schema.validators import get_object, is_ignoring_unknown

Body = Mapping[str, Any]


def check_schemas(
    params: Body,
    *,
    tool_path: str = "tools[{index}].parameters",
    format_error: errors.ErrorTemplate = errors.INVALID_FORMAT_SCHEMA,
) -> None:
    """Reject schemas of functions that are not objects, and schemas in strict mode that are not strict.

    Where unknown parameters are ignored, all are accepted: other servers accept them.
    """
    if is_ignoring_unknown():
        return
    for path, tool in _list_functions(params.get("tools") or (), tool_path):
        schema = tool.get("parameters")
        if schema is None:
            continue
        problem = find_problem(schema, is_strict=tool.get("strict"))
        if problem is not None:
            raise errors.INVALID_FUNCTION_SCHEMA(path=path, name=tool["name"], problem=problem)
    text_format = get_object(get_object(params, "text"), "format")
    if text_format.get("type") == "json_schema" and text_format.get("strict"):
        problem = find_problem(text_format["schema"], is_strict=True)
        if problem is not None:
            raise format_error(name=text_format["name"], problem=problem)


def find_problem(schema: Body, *, is_strict: bool | None) -> str | None:
    """Return why the live API does not accept a schema, or None."""
    kind = schema.get("type")
    if kind != "object":
        return f"schema must be a JSON Schema of 'type: \"object\"', got 'type: \"{kind}\"'."
    if not is_strict:
        return None
    return next(_iter_strict_problems(schema, ()), None)


def _list_functions(tools: Sequence[Body], path: str) -> Iterator[tuple[str, Body]]:
    for index, tool in enumerate(tools):
        if tool["type"] == "namespace":
            yield from _list_functions(tool["tools"], f"tools[{index}].{path}")
        elif tool["type"] == "function":
            yield path.replace("{index}", str(index)), tool


def _iter_strict_problems(schema: Body, context: tuple[str, ...]) -> Iterator[str]:
    kind = schema.get("type")
    if kind == "object" or (isinstance(kind, list) and "object" in kind):
        if schema.get("additionalProperties") is not False:
            yield (
                f"In context={context}, 'additionalProperties' is required to be supplied and to be "
                "false."
            )
        required = schema.get("required")
        for name in get_object(schema, "properties"):
            if not isinstance(required, list) or name not in required:
                yield (
                    f"In context={context}, 'required' is required to be supplied and to be an array "
                    f"including every key in properties. Missing '{name}'."
                )
    for steps, inner in _iter_inner(schema):
        yield from _iter_strict_problems(inner, (*context, *steps))


def _iter_inner(schema: Body) -> Iterator[tuple[tuple[str, ...], Body]]:
    """Yield the schemas directly inside a schema, with the steps to them."""
    for key in ("properties", "$defs", "definitions"):
        members = get_object(schema, key)
        yield from (((key, name), get_object(members, name)) for name in members)
    if "items" in schema:
        yield ("items",), get_object(schema, "items")
    choices = schema.get("anyOf")
    if isinstance(choices, list):
        members = {str(index): one for index, one in enumerate(cast("list[Any]", choices))}
        yield from ((("anyOf", index), get_object(members, index)) for index in members)
