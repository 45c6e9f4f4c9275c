"""Strict parsing of JSON text: numbers, member names and encodings."""

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from kedge.errors import InvalidJSON
from kedge.turns import dumps, loads
from kedge.turns.frozen_json import MAX_DEPTH, freeze
from kedge.turns.json_codec import parse_json
from strategies import json_values

LARGEST = (1 << 2048) - 1


def turn_json(data: str) -> str:
    return f'{{"format": "kedge.turn", "version": 1, "blocks": [], "data": {{"x": {data}}}}}'


REJECTED = [
    ("NaN", "$.data.x", "NaN is not a JSON number"),
    ("[1, Infinity]", "$.data.x[1]", "Infinity is not a JSON number"),
    ("-Infinity", "$.data.x", "-Infinity is not a JSON number"),
    ("1e999", "$.data.x", "the number is too large"),
    ("-1e999", "$.data.x", "the number is too large"),
    ("1e-999", "$.data.x", "the number is too small"),
    ('{"y": 0.0000001e-400}', "$.data.x.y", "the number is too small"),
    (str(LARGEST + 1), "$.data.x", "an integer of more than 2048 bits"),
    (f"-{LARGEST + 1}", "$.data.x", "an integer of more than 2048 bits"),
    ("9" * 10_000, "$.data.x", "an integer of more than 2048 bits"),
    ("[" + "1" * 618 + "]", "$.data.x[0]", "an integer of more than 2048 bits"),
    (r'"\ud800"', "$.data.x", "lone surrogate at character 0"),
    (r'{"\udfff": 1}', r'$.data.x["\udfff"]', "lone surrogate at character 0"),
    (r'"a\udc00\ud800"', "$.data.x", "lone surrogate at character 1"),
    ('{"y": 1, "y": 1}', "$.data.x.y", "given twice"),
    ('{"a b": {"": 1, "c": 2, "": 3}}', '$.data.x["a b"][""]', "given twice"),
    ("[" * 101 + "]" * 101, "$.data.x" + "[0]" * 99, "nested more than 100 levels deep"),
]


@for_each(("data", "path", "problem"), REJECTED)
def test_inexact_value_is_rejected_with_its_path(data: str, path: str, problem: str) -> None:
    """A value that Python would change, invent or drop raises an error with its path."""
    with pytest.raises(InvalidJSON) as error:
        loads(turn_json(data))
    assert (error.value.path, error.value.problem) == (path, problem)


LOCATED_ERRORS = [
    ("NaN", "$", "NaN is not a JSON number"),
    ('{"format": "kedge.turn", "format": "kedge.turn"}', "$.format", "given twice"),
    (
        '{"format": "kedge.turn", "version": 1, "blocks": 1e999}',
        "$.blocks",
        "the number is too large",
    ),
    ('{"format": "kedge.turn", "version": 1, "blocks": [], "id": NaN}', "$.id", "NaN is not"),
]
LOCATED_BLOCK_ERRORS = [
    ('{"kind": "user", "parts": [], "kind": "user"}', ".kind", "given twice"),
    ('{"kind": Infinity}', ".kind", "Infinity is not a JSON number"),
    ('{"kind": "user", "parts": [-Infinity]}', ".parts[0]", "-Infinity is not a JSON number"),
    ('{"kind": "user", "parts": [], "metadata": NaN}', ".metadata", "NaN is not a JSON number"),
    ('{"kind": "tool_call", "call_id": "c", "name": NaN}', ".name", "NaN is not a JSON number"),
    ('{"kind": "dream", "a": [{"b": 1, "b": 2}]}', ".a[0].b", "given twice"),
]
LOCATED_ERRORS += [
    (
        f'{{"format": "kedge.turn", "version": 1, "blocks": [{block}]}}',
        f"$.blocks[0]{path}",
        problem,
    )
    for block, path, problem in LOCATED_BLOCK_ERRORS
]


@for_each(("text", "path", "problem"), LOCATED_ERRORS)
def test_invalid_value_of_a_known_member_is_reported(text: str, path: str, problem: str) -> None:
    """An invalid number or duplicate in a known member is reported as such, not as a wrong type."""
    with pytest.raises(InvalidJSON) as error:
        loads(text)
    assert error.value.path == path
    assert error.value.problem.startswith(problem)


PRESERVED: list[tuple[str, Any]] = [
    ("18446744073709551616", 1 << 64),
    ("-9223372036854775809", -(1 << 63) - 1),
    ("9007199254740993", (1 << 53) + 1),
    (str(LARGEST), LARGEST),
    (str(-LARGEST), -LARGEST),
    ("0", 0),
    ("-0.0", -0.0),
    ("0e-999", 0.0),
    ("5e-324", 5e-324),
    ("1.7976931348623157e308", 1.7976931348623157e308),
    ("1E2", 100.0),
    (r'"\ud83d\ude00"', "\U0001f600"),
    (r'"\u0000"', "\x00"),
]


@for_each(("data", "value"), PRESERVED)
def test_valid_values_are_stored_exactly(data: str, value: Any) -> None:
    """Large integers, the limits of doubles and escaped text are unchanged after a round trip."""
    turn = loads(turn_json(data))
    assert repr(turn.data["x"]) == repr(value)
    assert repr(loads(dumps(turn)).data["x"]) == repr(value)


NOT_JSON: list[tuple[Any, str]] = [
    ("", "not JSON: Expecting value at character 0"),
    ("{", "not JSON"),
    ("[1] x", "not JSON: Extra data at character 4"),
    ("{'a': 1}", "not JSON"),
    ('"a\nb"', "not JSON: Invalid control character"),
    ("\ufeff{}", "not JSON"),
    ("{}".encode("utf-8-sig"), "not JSON"),
    ("{}".encode("utf-16"), "not UTF-8 at byte 0"),
    (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
    (b'"\xed\xa0\x80"', "not UTF-8 at byte 1"),
    ("[" * 100_000, "nested too deeply"),
    ('{"a":' * 100_000, "nested too deeply"),
    (None, "expected JSON text, got NoneType"),
    ({}, "expected JSON text, got dict"),
]


@for_each(("text", "problem"), NOT_JSON)
def test_text_that_is_not_json_is_rejected(text: Any, problem: str) -> None:
    """Invalid text, other encodings and excessive nesting are rejected with the path of the root."""
    with pytest.raises(InvalidJSON) as error:
        loads(text)
    assert error.value.path == "$"
    assert problem in error.value.problem


@given(json_values())
def test_valid_json_is_parsed_as_by_the_standard_library(value: Any) -> None:
    """Valid JSON is parsed to the same value as by Python's own parser."""
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert (
            json.dumps(parse_json(text))
            == json.dumps(parse_json(text.encode()))
            == json.dumps(value)
        )


@given(st.integers(1, MAX_DEPTH), st.sampled_from(["[]", "{}"]))
def test_text_can_be_nested_to_the_limit(depth: int, brackets: str) -> None:
    """The parser accepts text nested as deeply as ``freeze`` allows."""
    inner = "1"
    for _ in range(depth):
        inner = f"[{inner}]" if brackets == "[]" else f'{{"a":{inner}}}'
    assert json.dumps(parse_json(inner)).replace(" ", "") == inner
    freeze(parse_json(inner))


DIGIT_LIMIT_SCRIPT = """
from kedge.errors import InvalidJSON
from kedge.turns import dumps, loads
form = '{"format": "kedge.turn", "version": 1, "blocks": [], "data": {"x": %s}}'
largest = (1 << 2048) - 1
assert loads(dumps(loads(form % largest))).data["x"] == largest
for digits in (618, 641, 1000, 5000):
    try:
        loads(form % ("9" * digits))
    except InvalidJSON as error:
        assert error.path == "$.data.x", error.path
    else:
        raise AssertionError(digits)
"""


def test_integer_limit_is_independent_of_int_max_str_digits() -> None:
    """The maximum size of integers is the same in a Python with the lowest ``int_max_str_digits``."""
    command = [sys.executable, "-X", "int_max_str_digits=640", "-c", DIGIT_LIMIT_SCRIPT]
    subprocess.run(command, timeout=300, check=True)
