"""Test the inference of a tool call's name from its arguments, also with hostile schemas."""

import json
from typing import Any

from for_each import for_each
from kedge._internal import json_schema
from kedge._internal.json_schema import infer_tool_name

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a"],
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
    {"name": "search", "input_schema": {"properties": {"a": {"type": "string"}}}},
    {"type": "function", "name": "broken", "parameters": {"$ref": "#/nowhere"}},
    {"type": "custom", "name": "note"},
    {"type": "web_search"},
]


@for_each(
    ("arguments", "custom", "expected"),
    [
        ('{"a": 1}', False, "add"),
        ('{"a": "x"}', False, "search"),
        ("{}", False, ""),
        ('{"c": 1}', False, ""),
        ("not JSON", False, ""),
        ("[1]", False, ""),
        ("free text", True, "note"),
    ],
)
def test_a_name_is_inferred_if_exactly_one_tool_fits(
    arguments: str, custom: bool, expected: str
) -> None:
    """The arguments are compared with the schemas of the offered tools, in the form of any API."""
    assert infer_tool_name(TOOLS, arguments, custom) == expected


def fits(schema: Any, value: Any, definitions: Any = None) -> bool:
    """Return whether a tool with the argument ``x`` of this schema is inferred for ``value``."""
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": definitions or {}}
    tool = {"type": "function", "name": "only", "parameters": parameters}
    return infer_tool_name([tool], json.dumps({"x": value}), False) == "only"


@for_each(
    ("schema", "matching", "other"),
    [
        ({"type": "integer"}, 2.0, 2.5),
        ({"type": "integer"}, 2, True),
        ({"type": "number"}, 2.5, "2.5"),
        ({"type": "boolean"}, True, 1),
        ({"type": ["string", "null"]}, None, 1),
        ({"enum": ["train", "ship"]}, "ship", "car"),
        ({"const": "ship"}, "ship", "train"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, None, "a"),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, 1, "a"),
        ({"allOf": [{"type": "integer"}, {"enum": [1, "a"]}]}, 1, "a"),
        ({"type": "array", "items": {"type": "string"}}, ["a"], [1]),
        ({"$ref": "#/$defs/Stop"}, {"city": "Lisbon"}, {"town": "Lisbon"}),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"any": 1}, {"any": "a"}),
        (True, 1, None),
    ],
)
def test_types_members_and_references_are_compared(schema: Any, matching: Any, other: Any) -> None:
    """The schema keywords that distinguish tools are evaluated."""
    stop = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    assert fits(schema, matching, {"Stop": stop})
    assert schema is True or not fits(schema, other, {"Stop": stop})


@for_each(
    "schema",
    [
        False,
        {"type": "captain"},
        {"$ref": "http://127.0.0.1:1/schema.json"},
        {"$ref": "#/$defs/loop"},
        {"enum": 1},
        "not a schema",
    ],
)
def test_a_schema_that_cannot_be_evaluated_fits_nothing(schema: Any) -> None:
    """References to URLs are not followed, and a reference loop ends."""
    assert not fits(schema, 1, {"loop": {"$ref": "#/$defs/loop"}})


def test_hostile_schemas_take_bounded_time() -> None:
    """Patterns are not evaluated, and references that multiply end the search."""
    assert fits({"type": "string", "pattern": "(a+)+$"}, "a" * 5_000 + "!")
    double = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    assert not fits({"$ref": "#/$defs/d0"}, 1, {**double, "d60": True})
    assert not fits({"enum": list(range(json_schema.MAX_STEPS))}, 1)
    assert not fits({"type": "string"}, "a" * json_schema.MAX_ARGUMENT_CHARS)
    deep = "[" * 50_000
    assert infer_tool_name(TOOLS, f'{{"a": {deep}', False) == ""
