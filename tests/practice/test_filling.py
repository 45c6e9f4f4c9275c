"""What the practice model makes for a JSON schema satisfies it, whatever the schema."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from kedge.practice.filling import fill
from kedge.practice.hints import Hints


def made(schema: Any, sentence: str = "", *facts: Any) -> Any:
    return fill(schema, Hints(sentence), lambda name: name, *facts)


def check(schema: Any, value: Any) -> None:
    Draft202012Validator.check_schema(schema)
    formats = Draft202012Validator.FORMAT_CHECKER
    Draft202012Validator(schema, format_checker=formats).validate(value)


def obj(required: bool = True, **members: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": members}
    return {**schema, "required": list(members)} if required else schema


CITY = obj(city={"type": "string"})
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": obj(
            value={"type": "integer"},
            children={"type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 0},
        )
    },
}
LIST = {
    "$ref": "#/$defs/link",
    "$defs": {
        "link": obj(
            head={"type": "string"}, tail={"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]}
        )
    },
}
SUM = {
    "anyOf": [{"$ref": "#/$defs/plus"}, {"type": "number"}],
    "$defs": {"plus": obj(left={"$ref": "#"}, right={"$ref": "#"})},
}

SAID: list[tuple[Any, str, Any]] = [
    (CITY, "in Paris", {"city": "Paris"}),
    (CITY, "for the Hague", {"city": "Hague"}),
    (CITY, "city=New York", {"city": "New York"}),
    (CITY, "city: 'Rio'", {"city": "Rio"}),
    (CITY, 'with city "Köln"', {"city": "Köln"}),
    (CITY, "with city Bern and nothing else", {"city": "Bern"}),
    (CITY, "", {"city": "city"}),
    (CITY, '{"city": "Oslo"}', {"city": "Oslo"}),
    (CITY, "city=12", {"city": "12"}),
    (obj(False, city={"type": "string"}), "in Paris", {"city": "Paris"}),
    (obj(False, city={"type": "string"}), "", {}),
    (obj(a={"type": "integer"}, b={"type": "integer"}), "2 and 3", {"a": 2, "b": 3}),
    (obj(a={"type": "integer"}, b={"type": "integer"}), "b=2, a=3", {"a": 3, "b": 2}),
    (obj(a={"type": "number"}), "1.5", {"a": 1.5}),
    (obj(a={"type": "integer"}), "1.5 or 4", {"a": 4}),
    (obj(a={"type": "integer"}), "a=two", {"a": 1}),
    (obj(a={"type": "integer", "minimum": 10}), "3", {"a": 10}),
    (obj(max_results={"type": "integer"}), "with max results 7", {"max_results": 7}),
    (obj(unit={"enum": ["c", "f"]}), "in f please", {"unit": "f"}),
    (obj(unit={"enum": ["c", "f"]}), "unit=F", {"unit": "f"}),
    (obj(unit={"enum": ["c", "f"]}), "", {"unit": "c"}),
    (obj(unit={"enum": ["c", "f"], "default": "f"}), "", {"unit": "f"}),
    (obj(False, unit={"enum": ["c", "f"]}), "", {}),
    (obj(on={"type": "boolean"}), "on=no", {"on": False}),
    (obj(on={"type": "boolean"}), "", {"on": True}),
    (obj(on={"type": "boolean", "default": False}), "", {"on": False}),
    (obj(n={"type": ["integer", "null"]}), "", {"n": None}),
    (obj(n={"type": ["integer", "null"]}), "take 3", {"n": 3}),
    (obj(n={"anyOf": [{"type": "integer"}, {"type": "null"}]}), "", {"n": None}),
    (obj(n={"anyOf": [{"type": "null"}, {"type": "integer"}]}), "take 3", {"n": 3}),
    (obj(n={"anyOf": [{"type": "integer"}, {"type": "string"}]}), "n=x", {"n": "x"}),
    (obj(n={"type": "array", "items": {"type": "number"}}), "1, 2 and 3.5", {"n": [1, 2, 3.5]}),
    (obj(n={"type": "array", "items": {"type": "number"}}), "n=[4, 5]", {"n": [4, 5]}),
    (obj(n={"type": "array", "items": {"type": "string"}}), "for Ann and Bob", {"n": ["Ann", "Bob"]}),
    (obj(n={"type": "array", "items": {"type": "string"}}), "n=[a, b]", {"n": ["a", "b"]}),
    (obj(n={"type": "string", "format": "date"}), "on 2026-02-03", {"n": "2026-02-03"}),
    (obj(n={"type": "string", "format": "uri"}), "see https://a.b/c.", {"n": "https://a.b/c"}),
    (obj(n={"type": "string", "pattern": "^[A-Z]{2}-\\d+$"}), "call it", {"n": "AA-0"}),
    (obj(n={"type": "string", "pattern": "^[A-Z]{2}-\\d+$"}), "n=QX-12", {"n": "QX-12"}),
    (obj(n={"type": "string", "pattern": "^[A-Z]{2}-\\d+$"}), "n=qx", {"n": "AA-0"}),
    (obj(n={"type": "string", "format": "date"}), "n=tomorrow", {"n": "2025-01-31"}),
    (obj(n={"type": "string", "maxLength": 3}), "n=abcdef", {"n": "abc"}),
    (obj(n={"const": 5}), "n=6", {"n": 5}),
    (obj(n={"type": "integer", "default": 9}), "", {"n": 9}),
    (obj(n={"type": "string", "examples": ["e"]}), "", {"n": "e"}),
    (obj(a=CITY, b=CITY), "from Rome to Bern", {"a": {"city": "Rome"}, "b": {"city": "Bern"}}),
    (TREE, "value=3", {"value": 3, "children": [{"value": 3, "children": []}]}),
    (LIST, "", {"head": "head", "tail": None}),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "sentence", "value"), SAID)
def test_values_of_the_sentence_go_where_they_fit(schema: Any, sentence: str, value: Any) -> None:
    """By name, by mention, by kind; what is missing is made up."""
    assert made(schema, sentence) == value
    check(schema, value)


def test_facts_go_first_and_keep_their_kind() -> None:
    """A fact goes to the first member that takes it as it is."""
    schema = obj(text={"type": "string"}, number={"type": "number"})
    assert made(schema, "2 + 3", 5) == {"text": "text", "number": 5}
    assert made(schema, "x", "fact") == {"text": "fact", "number": 1}
    choice = obj(size={"enum": ["s", "m"]})
    assert made(choice, "", "m") == {"size": "m"}


TRICKY: list[Any] = [
    {},
    True,
    {"type": "object"},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2},
    {"type": "object", "required": ["ghost"]},
    {"properties": {"a": {"type": "null"}}, "required": ["a"]},
    {"type": "array"},
    {"type": "array", "items": False},
    {"type": "array", "maxItems": 0},
    {"type": "array", "minItems": 3, "items": {"type": "integer"}, "uniqueItems": True},
    {"type": "array", "minItems": 2, "items": {"type": "boolean"}, "uniqueItems": True},
    {"type": "array", "minItems": 3, "items": {"enum": [1, 2, 3]}, "uniqueItems": True},
    {"type": "array", "minItems": 2, "items": {"type": "string", "maxLength": 1}, "uniqueItems": True},
    {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
    {"type": "string", "minLength": 30},
    {"type": "string", "maxLength": 0},
    {"type": "string", "pattern": "^(foo|bar)+[^a-z0-9]\\.\\w{2,5}?(?:x|y)*$"},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "multipleOf": 0.05, "minimum": 1.01},
    {"type": "integer", "multipleOf": 0.5, "exclusiveMinimum": 7},
    {"type": "integer", "maximum": -7, "multipleOf": 5},
    {"allOf": [CITY, obj(n={"type": "integer"})]},
    {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
     "$defs": {"a": CITY, "b": obj(z={"type": "null"})}},
    {"oneOf": [obj(kind={"const": "a"}), obj(kind={"const": "b"}, n={"type": "integer"})]},
    {"enum": [None]},
    {"type": ["null"]},
    TREE,
    LIST,
    SUM,
    {"$ref": "#/definitions/x~1y", "definitions": {"x/y": {"type": "integer"}}},
    {"$ref": "#/prefixItems/0", "prefixItems": [{"type": "integer"}]},
    *({"type": "string", "format": name} for name in (
        "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")),
]  # fmt: skip


@pytest.mark.parametrize("schema", TRICKY, ids=str)
@pytest.mark.parametrize("sentence", ["", "take 3 of them to Paris, on 2026-02-30, at a@b.c"])
def test_tricky_schemas_are_satisfied(schema: Any, sentence: str) -> None:
    """Bounds, tuples, references, recursion, formats."""
    check(schema, made(schema, sentence))


MALFORMED: list[Any] = [
    {"type": "object", "properties": 3, "required": 4},
    {"type": "array", "minItems": "many"},
    {"type": "string", "minLength": "x", "pattern": 4},
    {"anyOf": 3},
    {"$ref": "elsewhere.json"},
    {"$ref": "#/nowhere"},
    {"$ref": "#"},
    {"allOf": [{"$ref": "#"}]},
    {"type": "spaceship"},
    {"type": {"a": 1}},
    {"enum": 3},
    "no schema",
    None,
]


@pytest.mark.parametrize("schema", MALFORMED, ids=str)
def test_what_is_no_schema_is_survived(schema: Any) -> None:
    """A malformed schema gives some value, never an error."""
    made(schema, "take 3")


def test_an_endless_schema_ends() -> None:
    """Recursion without a way out is cut, and so are enormous lists."""
    assert made(obj(b={"$ref": "#"}, c={"$ref": "#"})) is not None
    assert len(made({"type": "array", "minItems": 10**9, "items": {"type": "integer"}})) == 1_000


names = st.sampled_from(["a", "b", "city", "count"])
leaves = st.one_of(
    st.builds(lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
              st.integers(-50, 50), st.integers(0, 9)),
    st.builds(lambda low, step: {"type": "number", "minimum": low, "multipleOf": step},
              st.integers(-5, 5), st.sampled_from([0.5, 1, 3])),
    st.builds(lambda low, size: {"type": "string", "minLength": low, "maxLength": low + size},
              st.integers(0, 9), st.integers(0, 9)),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "format": "date"}]),
    st.builds(lambda values: {"enum": values}, st.lists(st.text(max_size=3), min_size=1, unique=True)),
    st.builds(lambda kind: {"type": [kind, "null"]}, st.sampled_from(["string", "integer"])),
)  # fmt: skip


def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    members = st.dictionaries(names, inner, max_size=4)
    return st.one_of(
        st.builds(
            lambda members, keep: {
                "type": "object",
                "properties": members,
                "required": [name for name in members if name in keep],
                "additionalProperties": False,
            },
            members,
            st.sets(names),
        ),
        st.builds(
            lambda items, low, size: {
                "type": "array",
                "items": items,
                "minItems": low,
                "maxItems": low + size,
            },
            inner,
            st.integers(0, 3),
            st.integers(0, 3),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    )


schemas = st.recursive(leaves, grown, max_leaves=12)
sentences = st.sampled_from(
    ["", "a=3, b=x and city=Rome", "5 and -2.5 to Paris", '{"a": [1], "count": null}', "count true"]
)


@given(schemas, sentences | st.text(max_size=40))
def test_any_schema_is_satisfied(schema: Any, sentence: str) -> None:
    """Whatever the sentence says, the schema has the last word."""
    check(schema, made(schema, sentence))
