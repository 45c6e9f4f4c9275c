"""Tests of the values that the practice model generates for a JSON schema."""

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from for_each import for_each
from kedge.errors import SchemaTooComplex
from kedge.server.practice_model.schema_sample import MAX_STEPS, SampleBudget, sample_value
from kedge.server.practice_model.sentence_values import SentenceValues


def make_sample(schema: Any, sentence: str = "", *facts: Any) -> Any:
    return sample_value(schema, SentenceValues(sentence, facts=facts), lambda name: name)


def check_value(schema: Any, value: Any) -> None:
    Draft202012Validator.check_schema(schema)
    formats = Draft202012Validator.FORMAT_CHECKER
    Draft202012Validator(schema, format_checker=formats).validate(value)


def object_schema(required: bool = True, **members: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": members}
    return {**schema, "required": list(members)} if required else schema


def list_schema(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


CITY = object_schema(city={"type": "string"})
STRING, INTEGER, NUMBER, NULL = ({"type": name} for name in ("string", "integer", "number", "null"))
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": object_schema(
            value=INTEGER, children=list_schema({"$ref": "#/$defs/node"}) | {"minItems": 0}
        )
    },
}
LIST = {
    "$ref": "#/$defs/link",
    "$defs": {"link": object_schema(head=STRING, tail={"anyOf": [{"$ref": "#/$defs/link"}, NULL]})},
}
SUM = {
    "anyOf": [{"$ref": "#/$defs/plus"}, NUMBER],
    "$defs": {"plus": object_schema(left={"$ref": "#"}, right={"$ref": "#"})},
}

SENTENCE_CASES: list[tuple[Any, str, Any]] = [
    (CITY, "in Paris", {"city": "Paris"}),
    (CITY, "for the Hague", {"city": "Hague"}),
    (CITY, "city=New York", {"city": "New York"}),
    (CITY, 'with city "Köln"', {"city": "Köln"}),
    (CITY, "", {"city": "city"}),
    (object_schema(a=INTEGER, b=INTEGER), "2 and 3", {"a": 2, "b": 3}),
    (object_schema(a=INTEGER, b=INTEGER), "b=2, a=3", {"a": 3, "b": 2}),
    (object_schema(a=INTEGER), "1.5 or 4", {"a": 4}),
    (object_schema(a=INTEGER | {"minimum": 10}), "", {"a": 10}),
    (object_schema(results=INTEGER), "with results 7", {"results": 7}),
    (object_schema(unit={"enum": ["c", "f"]}), "unit=F", {"unit": "f"}),
    (object_schema(unit={"enum": ["c", "f"], "default": "f"}), "", {"unit": "f"}),
    (object_schema(False, unit={"enum": ["c", "f"]}), "in c", {"unit": "c"}),
    (object_schema(False, unit={"enum": ["c", "f"]}), "", {}),
    (object_schema(on={"type": "boolean"}), "on=no", {"on": False}),
    (object_schema(on={"type": "boolean", "default": False}), "", {"on": False}),
    (object_schema(n={"anyOf": [NULL, INTEGER]}), "take 3", {"n": 3}),
    (object_schema(n={"anyOf": [NULL, INTEGER]}), "", {"n": None}),
    (object_schema(n={"anyOf": [INTEGER, STRING]}), "n=x", {"n": "x"}),
    (object_schema(n=list_schema(NUMBER)), "1, 2 and 3.5", {"n": [1, 2, 3.5]}),
    (object_schema(n=list_schema(STRING)), "for Ann and Bob", {"n": ["Ann", "Bob"]}),
    (object_schema(n=list_schema(STRING)), "n=[a, b]", {"n": ["a", "b"]}),
    (object_schema(n=list_schema(INTEGER)), "[1, 2]", {"n": [1, 2]}),
    (object_schema(n=STRING | {"format": "date"}), "n=2026-02-03", {"n": "2026-02-03"}),
    (object_schema(n=STRING | {"format": "date"}), "to Rome", {"n": "2025-01-31"}),
    (object_schema(n={"const": 5}), "n=6", {"n": 5}),
    (object_schema(a=CITY, b=CITY), "from Rome to Bern", {"a": {"city": "Rome"}, "b": {"city": "Bern"}}),
    (LIST, "", {"head": "head", "tail": None}),
]  # fmt: skip


@for_each(("schema", "sentence", "value"), SENTENCE_CASES)
def test_values_of_the_sentence_fill_the_schema(schema: Any, sentence: str, value: Any) -> None:
    """Values are assigned by name, by mention and by type, and missing ones are generated."""
    assert make_sample(schema, sentence) == value
    check_value(schema, value)


PERSON = object_schema(name={"type": "string"}, age={"type": "integer"})
SHAPE = {
    "anyOf": [
        object_schema(kind={"const": "circle"}, radius={"type": "number"}),
        object_schema(kind={"const": "box"}, sides=list_schema({"type": "integer"})),
    ]
}
GIVEN_CASES: list[tuple[Any, Any]] = [
    (object_schema(entities=list_schema(object_schema(name={"type": "string"}))),
     {"entities": [{"name": "Ada"}, {"name": "Grace"}]}),
    (object_schema(n=list_schema({"enum": ["a", "b", 3]})), {"n": ["b", 3, "a", "b"]}),
    (object_schema(n=list_schema({"type": ["string", "boolean"]})), {"n": [True, "x", False]}),
    (object_schema(n=list_schema(SHAPE)),
     {"n": [{"kind": "box", "sides": [1, 2]}, {"kind": "circle", "radius": 0.5}]}),
    (object_schema(n=list_schema({"$ref": "#/$defs/p"})) | {"$defs": {"p": PERSON}},
     {"n": [{"name": "Ada", "age": 36}, {"name": "Bob", "age": 7}]}),
    (object_schema(person=PERSON), {"person": {"name": "Ada", "age": 36}}),
    (object_schema(person={"allOf": [PERSON, object_schema(city={"type": "string"})]}),
     {"person": {"name": "Ada", "age": 36, "city": "Rome"}}),
    (object_schema(name={"type": "string"}, child=object_schema(False, name={"type": "string"})),
     {"name": "Ada", "child": {}}),
    (object_schema(meta={"type": "object"}), {"meta": {"a": [1, {"b": None}]}}),
    ({"type": "object"}, {"a": {"b": 1}}),
    (object_schema(n={"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]}), {"n": ["x", 2]}),
    (TREE, {"value": 1, "children": [{"value": 2, "children": [{"value": 3, "children": []}]}]}),
    (LIST, {"head": "a", "tail": {"head": "b", "tail": {"head": "c", "tail": None}}}),
    (SUM, {"left": 1, "right": {"left": {"left": 2, "right": 3}, "right": 4}}),
]  # fmt: skip


@for_each(("schema", "value"), GIVEN_CASES)
def test_values_that_are_given_as_json_are_used(schema: Any, value: Any) -> None:
    """Nested values of a JSON object in the sentence are used, whatever the schema says them with."""
    check_value(schema, value)
    assert make_sample(schema, json.dumps(value)) == value
    assert make_sample(schema, f"with {json.dumps(value)} and the rest") == value


PEOPLE = object_schema(people=list_schema(PERSON))
NESTED_CASES: list[tuple[Any, str, Any]] = [
    (PEOPLE, 'people=[{"name": "Ada", "age": 3}]', {"people": [{"name": "Ada", "age": 3}]}),
    (PEOPLE, '{"people": [{"name": "Ada", "age": "x"}]}', {"people": [{"name": "Ada", "age": 1}]}),
    (PEOPLE, '{"people": [{"age": 4}], "name": "Eve"}', {"people": [{"name": "Eve", "age": 4}], "name": "Eve"}),
    (object_schema(a=PERSON, b=PERSON), 'a={"name": "A", "age": 1} and b: {"name": "B", "age": 2}',
     {"a": {"name": "A", "age": 1}, "b": {"name": "B", "age": 2}}),
    (object_schema(n=list_schema(INTEGER) | {"minItems": 3}), '{"n": [7]}', {"n": [7, 1, 1]}),
    (object_schema(p=PERSON | {"additionalProperties": False}), '{"p": {"name": "A", "age": 1, "z": 2}}',
     {"p": {"name": "A", "age": 1}}),
    (object_schema(n=NUMBER), '{"n": NaN}', {"n": 1}),
]  # fmt: skip


@for_each(("schema", "sentence", "value"), NESTED_CASES)
def test_only_what_is_missing_or_does_not_fit_is_generated(
    schema: Any, sentence: str, value: Any
) -> None:
    """A given value that the schema rejects is repaired in the part that it rejects."""
    assert make_sample(schema, sentence) == value
    check_value(schema, value)


def test_facts_are_used_first() -> None:
    """A fact is assigned to the first property whose type it has."""
    schema = object_schema(text={"type": "string"}, number={"type": "number"})
    assert make_sample(schema, "2 + 3", 5) == {"text": "text", "number": 5}
    assert make_sample(schema, "x", "fact") == {"text": "fact", "number": 1}
    choice = object_schema(size={"enum": ["s", "m"]})
    assert make_sample(choice, "", "m") == {"size": "m"}


EDGE_CASES: list[Any] = [
    {},
    True,
    {"type": "object", "required": ["ghost"]},
    {"properties": {"a": {"type": "null"}}, "required": ["a"]},
    {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
    {"type": "number", "minimum": 2.5},
    {"allOf": [{"$ref": "#/$defs/a"}], "description": "a city", "$defs": {"a": CITY}},
    {"oneOf": [object_schema(kind={"const": "a"}), object_schema(kind={"const": "b"}, n={"type": "integer"})]},
    {"$ref": "#/definitions/x~1y", "definitions": {"x/y": {"type": "integer"}}},
    *({"type": "string", "format": name} for name in (
        "date", "time", "date-time", "email", "uuid", "uri")),
]  # fmt: skip


@for_each("schema", EDGE_CASES)
@for_each("sentence", ["", "take 3 of them to Paris, on 2026-02-30, at a@b.c"])
def test_edge_case_schemas_are_satisfied(schema: Any, sentence: str) -> None:
    """Values satisfy schemas with bounds, tuples, references, recursion and formats."""
    check_value(schema, make_sample(schema, sentence))


MALFORMED: list[Any] = [
    {"type": "object", "properties": 3, "required": 4}, {"type": "array", "minItems": "many"},
    {"type": "string", "minLength": "x", "pattern": 4}, {"anyOf": 3}, {"$ref": "elsewhere.json"},
    {"$ref": "#/nowhere"}, {"$ref": "#"}, {"allOf": [{"$ref": "#"}]}, {"type": "spaceship"},
    {"type": {"a": 1}}, {"enum": 3}, "no schema", None,
]  # fmt: skip


@for_each("schema", MALFORMED)
def test_malformed_schemas_are_accepted(schema: Any) -> None:
    """A malformed schema gives some value and raises no error."""
    make_sample(schema, "take 3")


def make_nested_references(levels: int) -> dict[str, Any]:
    """Return a small schema with four references on each level."""
    definitions: dict[str, Any] = {
        f"d{level}": {"allOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 4} for level in range(levels)
    }
    return {"$ref": "#/$defs/d0", "$defs": definitions | {f"d{levels}": {"type": "string"}}}


def nest_arrays(levels: int, items: int, inner: dict[str, Any]) -> dict[str, Any]:
    for _ in range(levels):
        inner = {"type": "array", "minItems": items, "items": inner}
    return inner


LONG_NAMES = {f"{number}{'n' * 5_000}": {"type": "string"} for number in range(200)}

HOSTILE: list[tuple[Any, str]] = [
    (make_nested_references(20), ""),
    (object_schema(a=make_nested_references(20)) | make_nested_references(20), "a=1"),
    (nest_arrays(2, 30, {"const": "x" * 10_000}), ""),
    ({"type": "array", "minItems": 10**9, "items": {"type": "integer"}}, ""),
    (nest_arrays(1, 50, {"enum": [["e" * 9_000]]}), ""),
    ({"enum": [str(number) for number in range(20_000)]}, ""),
    ({"allOf": [{"type": "string"}] * 20_000}, ""),
    ({"$ref": "#" + "/a" * 20_000}, ""),
    (object_schema(b={"$ref": "#"}, c={"$ref": "#"}), ""),
    (object_schema(True, **LONG_NAMES), ""),
    (nest_arrays(1, 3_000, {"type": "null"}), ", ".join(map(str, range(400)))),
]
"""Schemas and sentences that take more work, or make a larger value, than the budget allows."""


@for_each(("schema", "sentence"), HOSTILE)
def test_work_and_output_of_a_schema_are_limited(schema: Any, sentence: str) -> None:
    """A hostile schema is rejected, after no more calls of functions than the budget allows."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    hints = SentenceValues(sentence)
    sys.setprofile(count)
    try:
        with pytest.raises(SchemaTooComplex, match=r"more than 100?,000 (steps|bytes)"):
            sample_value(schema, hints, str)
    finally:
        sys.setprofile(None)
    assert calls < 40 * MAX_STEPS


def test_samples_share_a_budget() -> None:
    """A large value within the budget satisfies its schema, and two of them can exceed it together."""
    schema = nest_arrays(1, 90, {"const": "x" * 1_000})
    budget = SampleBudget()
    check_value(schema, sample_value(schema, SentenceValues(""), str, budget))
    with pytest.raises(SchemaTooComplex, match="bytes"):
        sample_value(schema, SentenceValues(""), str, budget)


def test_a_pattern_is_never_evaluated() -> None:
    """A pattern could take ``re`` forever to match, so it is ignored."""
    schema = object_schema(n={"type": "string", "pattern": "^(?:a+)+$"})
    assert make_sample(schema, f"n={'a' * 60}b") == {"n": "a" * 60 + "b"}
    assert make_sample(schema) == {"n": "n"}


names = st.sampled_from(["a", "b", "city", "count"])
leaves = st.one_of(
    st.sampled_from([STRING, INTEGER, NUMBER, NULL, {"type": "boolean"}, STRING | {"format": "date"}]),
    st.builds(lambda low: {"type": "integer", "default": low}, st.integers(-50, 50)),
    st.builds(lambda values: {"enum": values}, st.lists(st.text(max_size=3), min_size=1, unique=True)),
    st.builds(lambda kind: {"type": [kind, "null"]}, st.sampled_from(["string", "integer"])),
)  # fmt: skip


def make_object(members: dict[str, Any], keep: set[str]) -> dict[str, Any]:
    required = [name for name in members if name in keep]
    return object_schema(False, **members) | {"required": required, "additionalProperties": False}


def make_array(items: Any, low: int) -> dict[str, Any]:
    return list_schema(items) | {"minItems": low}


def extend_schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    members = st.dictionaries(names, inner, max_size=4)
    return st.one_of(
        st.builds(make_object, members, st.sets(names)),
        st.builds(make_array, inner, st.integers(0, 3)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    )


schemas = st.recursive(leaves, extend_schemas, max_leaves=12)
sentences = st.sampled_from(
    ["", "a=3, b=x and city=Rome", "5 and -2.5 to Paris", '{"a": [1], "count": null}', "count true"]
)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["x", "Rome", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
objects = st.builds(json.dumps, st.dictionaries(names, json_values, min_size=1, max_size=4))


@given(schemas, sentences | objects | st.text(max_size=40))
def test_any_schema_of_types_and_constants_is_satisfied(schema: Any, sentence: str) -> None:
    """The value has the types, required members and constants of a random schema, whatever the sentence says."""
    check_value(schema, make_sample(schema, sentence))
