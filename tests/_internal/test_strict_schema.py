"""Tests of strict schemas: closed objects, required properties, and null for omitted values."""

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from for_each import for_each
from kedge._internal.json_schema import (
    DROPPED_KEYWORDS,
    UNSUPPORTED_KEYWORDS,
    list_subschemas,
    to_strict_schema,
)
from kedge.errors import InvalidArguments, InvalidTool
from kedge.tools.schema import FunctionSchema, build_function_schema
from kedge.tools.signature import parse_signature
from kedge.turns import tool_call
from kedge.turns.frozen_json import thaw


class Color(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    y: int = 0


class Tree(BaseModel):
    label: str = Field("", max_length=9)
    branches: list["Tree"] = []
    above: "Tree | None" = Field(None, description="The parent.")


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


def paint(
    where: Annotated[Point, Field(description="The place.")],
    color: Color = Color.RED,
    size: Annotated[int, Field(ge=1, description="In pixels.")] = 3,
    note: str | None = None,
    tree: Tree | None = None,
    pet: Annotated[Cat | Dog, Field(discriminator="kind")] | None = None,
    many: list[Point] = Field(default_factory=lambda: [Point(1)], max_length=3),  # noqa: B008
) -> None:
    """Paint."""


def make_strict_schema(function: Callable[..., Any]) -> FunctionSchema:
    return build_function_schema(function.__name__, parse_signature(function), strict=True)


def iter_schemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    for inner in list_subschemas(schema):
        yield from iter_schemas(inner)


def test_a_strict_schema_has_only_what_strict_mode_supports() -> None:
    """Objects are closed at every depth, all properties required, and no keywords beside a ``$ref``."""
    strict = thaw(make_strict_schema(paint).json_schema)
    objects = [s for s in iter_schemas(strict) if s.get("type") == "object"]
    assert len(objects) >= 5
    for schema in objects:
        assert schema["additionalProperties"] is False
        assert schema["required"] == list(schema["properties"])
    for schema in iter_schemas(strict):
        assert not schema.keys() & (DROPPED_KEYWORDS | UNSUPPORTED_KEYWORDS.keys() | {"oneOf"})
        assert "$ref" not in schema or schema.keys() == {"$ref"}
    size = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}
    assert strict["properties"]["where"]["description"] == "The place."
    assert strict["properties"]["size"] == {**size, "description": "In pixels."}


def test_null_means_the_default() -> None:
    """Strict mode requires every property, so null selects the default, also one in an annotation."""
    schema = make_strict_schema(paint)
    arguments: dict[str, Any] = {"where": {"x": 1, "y": 2}, "color": None, "size": None}
    arguments |= {"note": None, "tree": None, "pet": None, "many": None}
    defaults = {"where": Point(1, 2), "note": None, "tree": None, "pet": None, "many": [Point(1)]}
    assert schema.parse_arguments(tool_call("paint", arguments)) == defaults
    given = schema.parse_arguments(tool_call("paint", {**arguments, "size": 5, "color": "red"}))
    assert given == {**defaults, "size": 5, "color": Color.RED}

    def f(x: Annotated[int, Field(default=4)]) -> None: ...

    assert make_strict_schema(f).parse_arguments(tool_call("f", {"x": None})) == {"x": 4}


@for_each("arguments", ['{"x": null', "null", "[null]"])
def test_a_value_that_is_not_an_object_is_reported(arguments: str) -> None:
    """Arguments that are not a JSON object raise ``InvalidArguments``."""

    def f(x: int = 1) -> None: ...

    with pytest.raises(InvalidArguments):
        make_strict_schema(f).parse_arguments(tool_call("f", arguments))


@dataclass
class Free:
    anything: dict[str, int] = field(default_factory=dict)


ARBITRARY = "strict mode does not support objects with arbitrary keys"


@for_each(
    ("annotation", "message"),
    [
        (Any, "arguments.x: strict mode requires a type here"),
        (dict[str, int], f"arguments.x: {ARBITRARY}"),
        (dict, f"arguments.x: {ARBITRARY}"),
        (list[Free], f"Free.anything: {ARBITRARY}"),
        (tuple[int, str], "arguments.x: strict mode does not support a tuple"),
    ],
)
def test_schemas_beyond_strict_mode_are_rejected(annotation: Any, message: str) -> None:
    """The error names the path of the unsupported type."""

    def f(x: int) -> None: ...

    f.__annotations__["x"] = annotation
    with pytest.raises(InvalidTool) as error:
        make_strict_schema(f)
    assert message in str(error.value)


def test_the_size_of_a_strict_schema_is_limited() -> None:
    """References with descriptions are copied, and a small schema with many of them is rejected."""

    def level(number: int) -> dict[str, Any]:
        reference = {"$ref": f"#/$defs/d{number + 1}", "description": "copied"}
        return {"type": "object", "properties": dict.fromkeys("abcd", reference)}

    definitions: Any = {f"d{number}": level(number) for number in range(20)}
    definitions["d20"] = {"type": "null"}
    schema = {"$ref": "#/$defs/d0", "description": "", "$defs": definitions}
    with pytest.raises(InvalidTool, match="its strict form has over 10,000 schemas"):
        to_strict_schema(schema, InvalidTool)
