"""Test the schema of a typed answer: what is sent for a type, and how answers are validated."""

import enum
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from for_each import for_each
from kedge._internal.json_schema import list_subschemas
from kedge.engines.output_schema import SchemaMismatch, to_output_schema
from kedge.errors import InvalidSetting
from kedge.tools import Toolbox


class Mast(BaseModel):
    """A mast with an optional height."""

    height: int = 10


class Ship(BaseModel):
    """A ship with masts."""

    name: str
    masts: list[Mast]


class Boat(BaseModel):
    """A boat with required members only."""

    name: str
    oars: int


class Folder(BaseModel):
    """A recursive model."""

    name: str
    folders: list["Folder"] = Field(default_factory=list["Folder"])


@dataclass
class Port:
    """A dataclass with a nested model and a constraint."""

    ship: Boat
    depth: Annotated[float, Field(gt=0)]


@dataclass
class Point:
    """A dataclass that any value fits."""

    x: Any


class Crew(TypedDict):
    """A typed dictionary."""

    captain: str


class Color(enum.Enum):
    """An enum."""

    RED = "red"
    BLUE = "blue"


def text_format(output: Any) -> dict[str, Any]:
    """Return the format that is sent for a type."""
    return to_output_schema(output).request_options()["text"]["format"]


def iter_schemas(schema: dict[str, Any]) -> Any:
    """Yield a schema and all schemas inside of it."""
    yield schema
    for inner in list_subschemas(schema):
        yield from iter_schemas(inner)


TYPES: dict[str, tuple[Any, str, Any]] = {
    "model": (Ship, '{"name": "Argo", "masts": [{"height": 3}]}', Ship(name="Argo", masts=[Mast(height=3)])),
    "default": (Ship, '{"name": "Argo", "masts": [{}]}', Ship(name="Argo", masts=[Mast()])),
    "recursive": (
        Folder,
        '{"name": "a", "folders": [{"name": "b", "folders": []}]}',
        Folder(name="a", folders=[Folder(name="b")]),
    ),
    "dataclass": (
        Port,
        '{"ship": {"name": "Argo", "oars": 2}, "depth": 4}',
        Port(Boat(name="Argo", oars=2), 4.0),
    ),
    "typed dictionary": (Crew, '{"captain": "Jason"}', {"captain": "Jason"}),
    "enum": (Color, '{"value": "red"}', Color.RED),
    "literal": (Literal["a", "b"], '{"value": "b"}', "b"),
    "number": (int, '{"value": 3}', 3),
    "bare number": (int, "3", 3),
    "list": (list[Boat], '{"value": [{"name": "Argo", "oars": 2}]}', [Boat(name="Argo", oars=2)]),
    "iterable": (Iterable[int], '{"value": [1, 2]}', [1, 2]),
    "union": (Boat | Port, '{"value": {"name": "Argo", "oars": 2}}', Boat(name="Argo", oars=2)),
    "bare union": (Boat | Port, '{"name": "Argo", "oars": 2}', Boat(name="Argo", oars=2)),
    "optional": (int | None, '{"value": null}', None),
}  # fmt: skip


@for_each("name", TYPES)
def test_a_type_is_sent_as_a_strict_object_and_its_answer_parsed(name: str) -> None:
    """All objects are closed, all members required, and other types are wrapped in an object."""
    output, text, value = TYPES[name]
    sent = text_format(output)
    assert sent["strict"] is True
    assert sent["schema"]["type"] == "object"
    for schema in iter_schemas(sent["schema"]):
        assert "default" not in schema
        if schema.get("type") == "object":
            assert schema["additionalProperties"] is False
            assert schema["required"] == list(schema["properties"])
    output_schema = to_output_schema(output)
    assert output_schema.parse(text) == value
    assert output_schema.parse(f"```json\n{text}\n```") == value
    assert output_schema.parse(json.dumps(output_schema.to_json(value))) == value


@for_each("output", [dict[str, int], Any, tuple[int, str], list[Any]])
def test_type_without_a_strict_form_is_sent_unchanged(output: Any) -> None:
    """A type without a strict form is not enforced by the server, only validated."""
    assert "strict" not in text_format(output)


def test_json_schema_is_strict_only_without_optional_members() -> None:
    """A schema with optional members at any depth is not strict, because strict mode requires them."""
    assert text_format(Boat.model_json_schema())["strict"] is True
    assert "strict" not in text_format(Ship.model_json_schema())
    assert "strict" not in text_format({"type": "array"})
    assert "strict" not in text_format({"required": ["ship"]})


@for_each(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}},
        {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/n"}}], "$defs": {"n": {"type": "integer"}}},
    ],
)  # fmt: skip
def test_non_object_json_schema_is_wrapped(schema: dict[str, Any]) -> None:
    """A JSON schema that is not an object is wrapped like the schema of a type."""
    output_schema = to_output_schema(schema)
    assert output_schema.wrapped
    assert output_schema.parse('{"value": [1]}') == output_schema.parse("[1]") == [1]
    with pytest.raises(SchemaMismatch):
        output_schema.parse('["x"]')


@for_each(
    ("form", "text", "expected"),
    [
        *((form, "no", "JSON") for form in (Boat, Boat.model_json_schema(), int)),
        *((form, '{"name": "Argo"}', "oars") for form in (Boat, Boat.model_json_schema())),
        *(
            (form, '{"name": 1, "oars": "two"}', "oars")
            for form in (Boat, Boat.model_json_schema())
        ),
        (int, '{"value": "x"}', ""),
        (int, "{}", ""),
    ],
)
def test_problems_are_listed_by_member(form: Any, text: str, expected: str) -> None:
    """Each problem is one line that names the member, also of a wrapped value or of its missing wrapper."""
    with pytest.raises(SchemaMismatch) as exc_info:
        to_output_schema(form).parse(text)
    assert expected in str(exc_info.value)
    assert all(line.startswith("- ") for line in str(exc_info.value).splitlines())


def test_a_message_lists_a_limited_number_of_problems() -> None:
    """The message lists the first problems and the number of the others."""
    schema = {"type": "array", "items": {"type": "string"}}
    with pytest.raises(SchemaMismatch) as exc_info:
        to_output_schema(schema).parse(str(list(range(20))))
    assert len(str(exc_info.value).splitlines()) == 9
    assert str(exc_info.value).endswith("- and 12 more")
    assert len(exc_info.value.problems) == 20


@for_each("wrong", [3, "text", {"type": "boat"}, Toolbox, type[int], Point(1)])
def test_a_value_without_a_schema_is_rejected(wrong: Any) -> None:
    """A value that has no JSON schema is rejected before anything is sent."""
    with pytest.raises(InvalidSetting, match="schema of answer"):
        to_output_schema(wrong)


@for_each(
    ("output", "text", "expected"),
    [
        (Boat, "", None),
        (Boat, "{", {}),
        (Boat, '{"name": "Ar', {"name": "Ar"}),
        (Boat, '```json\n{"name": "Argo", "oars": 2}\n```', {"name": "Argo", "oars": 2}),
        (list[int], '{"val', None),
        (list[int], '{"value": [1, 2', [1, 2]),
        (list[int], "[1, 2", [1, 2]),
        (int, "no", None),
    ],
)
def test_partial_text_gives_the_values_so_far(output: Any, text: str, expected: Any) -> None:
    """The values of a partial text are unwrapped and not validated."""
    assert to_output_schema(output).parse_partial(text) == expected


def test_schema_name_is_valid_for_servers() -> None:
    """The name is that of the class or the title of the JSON schema, with valid characters."""
    assert to_output_schema(Boat).name == "Boat"
    assert to_output_schema(list[Boat]).name == "answer"
    assert to_output_schema({"title": "A boat!", "type": "object"}).name == "A_boat_"


def test_a_schema_is_immutable_json() -> None:
    """A schema is copied; what is built from it is independent of it, and infinite defaults are left out."""

    class Limit(BaseModel):
        value: float = float("inf")

    schema = to_output_schema(Limit)
    schema.request_options()["text"]["format"]["schema"]["properties"].clear()
    assert schema.schema["properties"] == {"value": {"title": "Value", "type": "number"}}
    given: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
    copied = to_output_schema(given)
    given["properties"].clear()
    assert list(copied.schema["properties"]) == ["a"]


@for_each("reference", ["http://127.0.0.1:1/schema.json", "#/$defs/Missing"])
def test_references_to_other_documents_are_not_followed(reference: str) -> None:
    """Nothing is downloaded to validate an answer, and an unresolved reference is an error."""
    schema = to_output_schema({"type": "object", "properties": {"a": {"$ref": reference}}})
    with pytest.raises(InvalidSetting, match="add the definition to"):
        schema.parse('{"a": 1}')
    local = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {}}}
    assert to_output_schema(local).parse('{"a": 1}') == {"a": 1}


@for_each(
    "text", ['{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', r'{"a": "\ud83d"}', "[" * 100_000]
)
def test_answer_that_only_python_reads_is_rejected(text: str) -> None:
    """A value that cannot be written as JSON again, or not be read at all, does not match a JSON schema."""
    with pytest.raises(SchemaMismatch, match="not valid JSON"):
        to_output_schema({"type": "object"}).parse(text)


def describe_object(**members: Any) -> dict[str, Any]:
    """Return the schema of an object with these members, all of them required."""
    return {"type": "object", "properties": members, "required": list(members)}


PORT = describe_object(port={"type": "string"})
ROME = {"port": "Rome"}
NULL = {"type": "null"}
DESCRIBED = {"$ref": "#/$defs/A", "description": "A"}
LIST_OF_A = {"type": "array", "items": {"$ref": "#/$defs/A"}}
OLD_LIST_OF_A = {"type": "array", "items": {"$ref": "#/definitions/A"}}
REFERENCES: dict[str, tuple[dict[str, Any], Any, Any, bool]] = {
    "true": (describe_object(a=True), {"a": 1}, {"a": 1}, False),
    "true in a list": ({"anyOf": [True, NULL]}, {"value": 1}, 1, False),
    "true as definition": ({"$ref": "#/$defs/A", "$defs": {"A": True}}, 1, 1, False),
    "described true": (
        {**describe_object(a=DESCRIBED), "$defs": {"A": True}}, {"a": 1}, {"a": 1}, False
    ),
    "definitions": ({"$ref": "#/definitions/A", "definitions": {"A": PORT}}, ROME, ROME, True),
    "list of definitions": (
        {**OLD_LIST_OF_A, "definitions": {"A": PORT}}, {"value": [ROME]}, [ROME], True
    ),
    "document id": (
        {**LIST_OF_A, "$id": "https://kedge.example/a", "$defs": {"A": PORT}},
        {"value": [ROME]}, [ROME], True,
    ),
    "recursive list": (
        {"type": "array", "items": {"$ref": "#"}}, {"value": [[], [[]]]}, [[], [[]]], True
    ),
    "recursive object": (
        describe_object(a={"anyOf": [{"$ref": "#"}, NULL]}),
        {"a": {"a": None}}, {"a": {"a": None}}, True,
    ),
    "part of a definition": (
        {"$ref": "#/$defs/A/properties/port", "$defs": {"A": PORT}}, "Rome", "Rome", False
    ),
    "described member": (
        describe_object(a={"type": "integer"}, b={"$ref": "#/properties/a", "description": "B"}),
        {"a": 1, "b": 2}, {"a": 1, "b": 2}, False,
    ),
}  # fmt: skip
"""JSON schemas with an answer, its value, and whether the schema has a strict form."""


@for_each("name", REFERENCES)
def test_json_schema_with_references_is_sent_and_validated(name: str) -> None:
    """References to any part of a schema, ``definitions`` and the schema ``true`` are accepted."""
    schema, answer, value, strict = REFERENCES[name]
    sent = text_format(schema)
    assert ("strict" in sent) is strict
    assert "definitions" not in sent["schema"]
    assert to_output_schema(schema).parse(json.dumps(answer)) == value


@for_each("text", ['{"value": [3]}', '{"value": [{"value": []}]}'])
def test_reference_to_the_schema_itself_is_not_one_to_its_wrapper(text: str) -> None:
    """In a wrapped schema, ``#`` still refers to the schema that was passed."""
    with pytest.raises(SchemaMismatch):
        to_output_schema({"type": "array", "items": {"$ref": "#"}}).parse(text)


def test_objects_that_may_be_null_are_closed() -> None:
    """An object of several types is closed like any other, and not strict if it is open-ended."""
    port = {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    ship = {"type": "object", "properties": {"port": port}, "required": ["port"]}
    assert text_format(ship)["schema"]["properties"]["port"]["additionalProperties"] is False
    for open_ended in ({"type": ["object", "null"]}, {"type": ["array", "null"]}):
        assert "strict" not in text_format({**ship, "properties": {"port": open_ended}})


@for_each("text", ["```json\n[1]\n```", "\n```\n\n[1]```\n", "```JSON  \r\n[1]\n```", "[1]"])
def test_a_fence_around_an_answer_is_removed(text: str) -> None:
    """An answer may be inside a fence of Markdown, with or without a language."""
    assert to_output_schema(list[int]).parse(text) == [1]


def test_a_fence_of_line_breaks_is_read_once() -> None:
    """Many line breaks after a fence without an end do not multiply the work."""
    with pytest.raises(SchemaMismatch, match="JSON"):
        to_output_schema(list[int]).parse("```" + "\n" * 100_000 + "x")
