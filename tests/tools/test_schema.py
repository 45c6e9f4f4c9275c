"""The JSON schema of a function, and arguments that reach it as typed values."""

import datetime as dt
import enum
import inspect
import json
import math
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, TypeAdapter
from typing_extensions import TypedDict

from kedge.errors import InvalidArguments, InvalidTool
from kedge.tools.schema import (
    FreeForm,
    FunctionSchema,
    build_explicit_schema,
    build_free_form,
    build_function_schema,
)
from kedge.tools.signature import parse_signature
from kedge.turns import ToolCallBlock, tool_call


class Unit(enum.Enum):
    C = "celsius"
    F = "fahrenheit"


@dataclass
class Point:
    x: float
    y: float = 0.0


class Leg(BaseModel):
    """One leg of a trip."""

    to: str = Field(description="The next place.")
    via: list[str] = []


class Box(TypedDict):
    title: str


def make_schema(function: Callable[..., Any], **options: Any) -> FunctionSchema:
    return build_function_schema(function.__name__, parse_signature(function), **options)


def read_arguments(schema: FunctionSchema, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    return schema.parse_arguments(tool_call("f", arguments, call_id="c1"))


def test_the_schema_of_every_kind_of_type() -> None:
    """Plain types, choices, containers, dataclasses and models, with texts and defaults."""

    def trip(
        start: str,
        legs: list[Leg],
        days: Annotated[int, Field(ge=1, description="How long.")] = 3,
        unit: Unit = Unit.C,
        mode: Literal["car", "train"] = "train",
        *,
        at: Point | None = None,
        notes: dict[str, int] | None = None,
    ) -> None:
        """Plan a trip.

        Args:
            start: Where from.
            days: Not used, the field says it.
        """

    assert make_schema(trip).json_schema == {
        "type": "object",
        "additionalProperties": False,
        "required": ["start", "legs"],
        "properties": {
            "start": {"type": "string", "description": "Where from."},
            "legs": {"type": "array", "items": {"$ref": "#/$defs/Leg"}},
            "days": {"type": "integer", "minimum": 1, "default": 3, "description": "How long."},
            "unit": {"$ref": "#/$defs/Unit", "default": "celsius"},
            "mode": {"type": "string", "enum": ["car", "train"], "default": "train"},
            "at": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}], "default": None},
            "notes": {
                "anyOf": [
                    {"type": "object", "additionalProperties": {"type": "integer"}},
                    {"type": "null"},
                ],
                "default": None,
            },
        },
        "$defs": {
            "Unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "Point": {
                "type": "object",
                "additionalProperties": False,
                "required": ["x"],
                "properties": {"x": {"type": "number"}, "y": {"type": "number", "default": 0.0}},
            },
            "Leg": {
                "type": "object",
                "description": "One leg of a trip.",
                "required": ["to"],
                "properties": {
                    "to": {"type": "string", "description": "The next place."},
                    "via": {"type": "array", "items": {"type": "string"}, "default": []},
                },
            },
        },
    }


def test_a_member_called_title_stays() -> None:
    """Only the titles that pydantic invents are left out."""

    def f(title: str, box: Box, named: Annotated[int, Field(title="A name")]) -> None: ...

    schema = make_schema(f).json_schema
    assert schema["properties"]["title"] == {"type": "string"}
    assert schema["properties"]["named"] == {"type": "integer", "title": "A name"}
    assert schema["$defs"]["Box"]["properties"] == {"title": {"type": "string"}}


def test_no_arguments_are_an_empty_object() -> None:
    """A function without parameters takes ``{}``, and nothing at all."""

    def now() -> str:
        return ""

    schema = make_schema(now)
    assert schema.json_schema == {"type": "object", "additionalProperties": False, "properties": {}}
    assert (
        read_arguments(schema, {})
        == read_arguments(schema, "")
        == read_arguments(schema, " ")
        == {}
    )


def test_only_given_arguments_are_passed_on() -> None:
    """A default that JSON cannot say stays the function's own business."""
    nothing = object()

    def f(x: int = nothing, y: Any = nothing, z: float = math.inf) -> None: ...  # pyright: ignore[reportArgumentType]

    schema = make_schema(f)
    plain = {"x": {"type": "integer"}, "y": {}, "z": {"type": "number"}}
    assert schema.json_schema["properties"] == plain
    assert read_arguments(schema, {"y": None}) == {"y": None}


def test_a_field_may_be_the_default_of_a_parameter() -> None:
    """``x: int = Field(…)`` means what it means in a model, factories included."""

    def f(
        x: int = Field(ge=1, description="The x."),
        y: int = Field(2, le=9),
        z: list[int] = Field(default_factory=list),  # noqa: B008 - as pydantic's users write it
        w: Annotated[int, Field(default=4)] = Field(description="The w."),
    ) -> None: ...

    schema = make_schema(f)
    assert schema.json_schema["required"] == ["x"]
    assert schema.json_schema["properties"]["x"] == {
        "type": "integer",
        "minimum": 1,
        "description": "The x.",
    }
    assert read_arguments(schema, {"x": 1}) == {"x": 1, "y": 2, "z": [], "w": 4}
    assert read_arguments(schema, {"x": 1, "y": 3, "z": [1]}) == {"x": 1, "y": 3, "z": [1], "w": 4}


def test_the_call_is_passed_to_who_asks_for_it() -> None:
    """A parameter of type ``ToolCallBlock`` is not in the schema and gets the call."""

    def f(x: int, call: ToolCallBlock) -> None: ...

    schema = make_schema(f)
    call = tool_call("f", {"x": 1}, call_id="c1")
    assert list(schema.json_schema["properties"]) == ["x"]
    assert schema.parse_arguments(call) == {"x": 1, "call": call}


class Plain:
    """A class that pydantic knows nothing about."""


def unknown(x: Plain) -> None: ...
def nested(a: int, x: list[dict[str, Plain]]) -> None: ...
def callback(x: Callable[[], int]) -> None: ...


@pytest.mark.parametrize("function", [unknown, nested, callback])
def test_a_type_without_a_schema_is_named(function: Callable[..., Any]) -> None:
    """The error says which parameter it is, though pydantic only says which type."""
    with pytest.raises(InvalidTool, match="parameter x has no JSON schema"):
        make_schema(function)


def test_defaults_that_contradict_each_other_are_refused() -> None:
    """Pydantic's own words, when it is no parameter's type that is wrong."""

    def f(x: Annotated[int, Field(default=1)] = Field(default_factory=int)) -> None: ...

    with pytest.raises(InvalidTool, match="f cannot be a tool: cannot specify both default"):
        make_schema(f)


def test_a_custom_tool_takes_one_text() -> None:
    """Free-form tools have one argument of type str, besides the call."""

    def shout(text: Annotated[str, "What."], call: ToolCallBlock) -> None: ...

    def two(a: str, b: str) -> None: ...

    def number(a: int) -> None: ...

    reader = build_free_form("shout", parse_signature(shout))
    assert isinstance(reader, FreeForm)
    call = tool_call("shout", "any { text", call_id="c1", custom=True)
    assert reader.parse_arguments(call) == {"text": "any { text", "call": call}
    for function in (two, number):
        with pytest.raises(InvalidTool, match="one argument of type str"):
            build_free_form("f", parse_signature(function))


def test_a_schema_may_be_written_by_hand() -> None:
    """Its arguments are JSON values; missing and unknown names are told."""
    plain = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    reader = build_explicit_schema("f", plain)
    assert reader.parse_arguments(tool_call("f", {"city": "Paris"})) == {"city": "Paris"}
    for arguments, problem in (
        ("{}", 'city: it is required and missing; expected {"type": "string"}'),
        ('{"city": "", "cty": 1}', "cty: unknown argument; did you mean city?"),
        ("[]", "the arguments must be one JSON object"),
        ("{", "the arguments are not valid JSON"),
    ):
        with pytest.raises(InvalidArguments) as error:
            reader.parse_arguments(tool_call("f", arguments))
        assert problem in error.value.problems[0]
    assert build_explicit_schema("f", {"type": "object"}).parse_arguments(
        tool_call("f", {"a": 1})
    ) == {"a": 1}
    with pytest.raises(InvalidTool, match='"type": "object"'):
        build_explicit_schema("f", {"type": "string"})


def test_pydantic_is_imported_with_the_first_tool() -> None:
    """Importing ``kedge.tools`` is cheap: pydantic is imported when a tool is made."""
    script = (
        "import sys, kedge.tools as t; assert 'pydantic' not in sys.modules;"
        "t.tool(lambda: 0, name='f'); assert 'pydantic' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


words = st.text(st.characters(codec="utf-8"), max_size=20)
numbers = st.integers(-(2**70), 2**70)
floats = st.floats(allow_nan=False, allow_infinity=False)
points = st.builds(Point, floats, floats)
VALUES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, numbers),
    (float, floats),
    (bool, st.booleans()),
    (str, words),
    (None, st.none()),
    (Unit, st.sampled_from(Unit)),
    (Literal["a", 1, True], st.sampled_from(["a", 1])),
    (Point, points),
    (Leg, st.builds(Leg, to=words, via=st.lists(words, max_size=3))),
    (int | None, st.none() | numbers),
    (str | list[int], words | st.lists(numbers, max_size=3)),
    (list[Point], st.lists(points, max_size=3)),
    (dict[str, Unit], st.dictionaries(words, st.sampled_from(Unit), max_size=3)),
    (tuple[int, str], st.tuples(numbers, words)),
    (set[int], st.sets(numbers, max_size=3)),
    (Box, st.fixed_dictionaries({"title": words})),
    (dt.datetime, st.datetimes(timezones=st.just(dt.UTC))),
    (dt.date, st.dates()),
    (uuid.UUID, st.uuids()),
    (Decimal, st.decimals(allow_nan=False, allow_infinity=False, places=3)),
    (Path, st.sampled_from([Path("a/b"), Path("/c")])),
    (Annotated[int, Field(ge=0, le=9), "A digit."], st.integers(0, 9)),
]
NAMES = st.sampled_from(
    ["a", "self", "cls", "schema", "json", "copy", "_x", "__y", "model_config", "model_fields", "é"]
)


@st.composite
def signatures(draw: st.DrawFn) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A function with random parameters, and values that fit them."""
    parameters: list[inspect.Parameter] = []
    values: dict[str, Any] = {}
    annotations: dict[str, Any] = {}
    for name in draw(st.lists(NAMES, unique=True, max_size=5)):
        annotation, fitting = draw(st.sampled_from(VALUES))
        value = draw(fitting)
        default = draw(st.sampled_from([inspect.Parameter.empty, value]))
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, annotation=annotation, default=default))
        annotations[name] = annotation
        if default is inspect.Parameter.empty or draw(st.booleans()):
            values[name] = value

    def function(**given: Any) -> dict[str, Any]:
        return given

    function.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    function.__annotations__ = annotations
    return function, values


@given(signatures())
def test_arguments_reach_the_function_as_they_were_meant(
    made: tuple[Callable[..., Any], dict[str, Any]],
) -> None:
    """Values written as JSON by the types of a signature come back equal, and of the same type."""
    function, values = made
    annotations = function.__annotations__
    written = {
        name: TypeAdapter(annotations[name]).dump_python(value, mode="json")
        for name, value in values.items()
    }
    got = read_arguments(make_schema(function), json.dumps(written))
    assert got == values
    assert {name: type(value) for name, value in got.items()} == {
        name: type(value) for name, value in values.items()
    }


@given(signatures())
def test_a_schema_names_all_arguments_and_no_others(
    made: tuple[Callable[..., Any], dict[str, Any]],
) -> None:
    """Properties are the parameters; required are those without a default."""
    function, _ = made
    parameters = inspect.signature(function).parameters
    plain = make_schema(function).json_schema
    assert list(plain["properties"]) == list(parameters)
    assert plain.get("required", []) == [
        name for name, p in parameters.items() if p.default is inspect.Parameter.empty
    ]
